"""Messages and signs of life between ranks."""
