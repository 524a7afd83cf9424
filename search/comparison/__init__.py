"""Strategies side by side: the same budget, prompts, seeds, engine and confirm stage for each."""
