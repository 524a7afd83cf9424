"""Propose, measure, record."""
