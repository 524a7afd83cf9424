"""Connections to the server."""
