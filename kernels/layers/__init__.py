"""Norms, rotary embeddings and activations."""
