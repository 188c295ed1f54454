"""Adapters in training on one base model: their passes, steps, checkpoints, and the weights of samplers."""
