"""The speedup of a config without decoding it."""
