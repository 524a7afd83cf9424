"""The decode config and what it is made of."""
