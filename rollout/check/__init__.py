"""Compare a hosted module with its own forward when an engine is made."""
