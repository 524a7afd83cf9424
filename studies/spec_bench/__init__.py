"""What the search finds on the prompts of Spec-Bench."""
