"""Seconds and counts from the model."""
