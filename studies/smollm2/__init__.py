"""A published model of ordinary training, and what the search finds on it."""
