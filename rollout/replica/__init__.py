"""One step on several ranks."""
