"""Generate for many prompts without a server: reading requests, and writing answers."""
