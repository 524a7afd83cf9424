"""Losslessness as a campaign: thousands of random greedy runs against Hugging Face's `generate`."""
