"""Wires and signs of life between ranks."""
