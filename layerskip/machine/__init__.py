"""The machine that it runs on."""
