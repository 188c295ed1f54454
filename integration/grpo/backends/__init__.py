"""Trainer backends: the ways to train a model on several ranks, one module each."""
