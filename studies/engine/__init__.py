"""How the engine's costs grow, and where it stands at several sizes."""
