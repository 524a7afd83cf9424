"""Lean layers over a model's own weights, by torch's operations."""
