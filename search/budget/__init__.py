"""How much a run measures within its time."""
