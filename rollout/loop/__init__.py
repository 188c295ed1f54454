"""The loop of steps, and the commands that run between two of them."""
