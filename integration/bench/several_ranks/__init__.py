"""Benchmarks of engines of several ranks, which they start themselves."""
