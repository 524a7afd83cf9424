"""What the search asks of a model."""
