"""Decoder sublayers compiled for this CPU."""
