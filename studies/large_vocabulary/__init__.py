"""A model with a large vocabulary, and what choosing among its first token ids alone is worth to a draft."""
