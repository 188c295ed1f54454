"""Deltas: only the changed weights are sent."""
