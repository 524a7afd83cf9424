"""An OpenAI-compatible HTTP server around one LayerSkipModel; needs the `serve` extra."""
