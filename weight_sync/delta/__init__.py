"""Deltas, which send the changed weights only."""
