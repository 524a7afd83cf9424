"""Drafters that look tokens up in the text so far, and what they look into."""
