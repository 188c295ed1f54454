"""Chooses the sequences of the next step."""
