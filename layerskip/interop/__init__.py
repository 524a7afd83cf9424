"""What Transformers' own generate takes from here: a custom generate, and a draft model."""
