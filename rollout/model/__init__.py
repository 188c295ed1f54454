"""The hosted Hugging Face module, its attention, experts and numerics."""
