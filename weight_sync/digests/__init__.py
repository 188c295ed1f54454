"""SHA-256 of resident tensors."""
