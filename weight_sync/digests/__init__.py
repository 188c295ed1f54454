"""Digests of resident tensors: the SHA-256 tree of a model, and the weights checkers."""
