"""Weights of 8 bits, of drafts, and of 8 or 4, of models that are quantised."""
