"""The execution of one step on several ranks."""
