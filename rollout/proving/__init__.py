"""Proofs of samples: a prefill that draws every token again and compares tokens and log-probabilities, bit by bit."""
