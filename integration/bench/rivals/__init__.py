"""Rivals of benchmarks: other packages at the same work, each in the Python of its own environment."""
