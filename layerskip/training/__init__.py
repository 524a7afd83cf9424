"""Training what drafts for a frozen model; see `python -m layerskip.train`."""
