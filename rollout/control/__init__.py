"""The connection between callers on any thread and the loop: requests, commands, locks, answers."""
