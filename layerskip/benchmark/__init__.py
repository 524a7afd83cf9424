"""Plain, speculative and Hugging Face's own decoding side by side, and where their time goes."""
