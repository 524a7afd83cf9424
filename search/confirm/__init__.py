"""The verdict on prompts that chose nothing, and its files."""
