"""Recurrent layers of a hosted module: their sequences in a forward, and their states in a rollout step."""
