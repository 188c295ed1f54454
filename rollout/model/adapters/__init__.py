"""PEFT adapters in hosted modules: their layers and state, and folders that an engine loads."""
