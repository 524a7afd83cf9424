"""The decode loop, its verifier, sampler and cache."""
