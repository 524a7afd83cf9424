"""What knows Transformers' internals."""
