"""From any thread to the loop, and back: requests, commands, locks, answers."""
