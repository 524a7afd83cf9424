"""Requests over HTTP, one and several at once, to our server and to others on the same machine."""
