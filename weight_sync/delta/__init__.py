"""Sends only what changed."""
