"""Drafting by one trained layer that goes on from the target's hidden states."""
