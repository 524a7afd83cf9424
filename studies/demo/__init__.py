"""The demo model: a small Llama trained on the Python standard library, and its maker."""
