"""Proving ground: small models whose drafts are known under every mask, so that a search is judged without noise."""
