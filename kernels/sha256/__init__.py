"""SHA-256 of many tiles at once."""
