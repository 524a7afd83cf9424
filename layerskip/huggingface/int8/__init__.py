"""Weights of 8 bits: of drafts, and of models that are quantised."""
