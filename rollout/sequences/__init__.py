"""Requests, their states, and the managers that alone write them."""
