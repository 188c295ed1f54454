"""Checkpoint folders in Hugging Face layout."""
