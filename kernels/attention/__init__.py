"""Paged and padded attention."""
