"""The choice of sequences for the next step."""
