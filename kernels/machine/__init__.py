"""Compilers, processors and GPUs."""
