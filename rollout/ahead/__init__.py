"""Batches of samples that are begun before their turn, for rollouts that run ahead of training."""
