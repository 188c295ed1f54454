"""Requests that move between workers: their seeds, and the streams that go on elsewhere."""
