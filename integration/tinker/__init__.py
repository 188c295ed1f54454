"""A server of the Tinker API: training and sampling of LoRA adapters on one base model, in one process."""
