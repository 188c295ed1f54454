"""Requests, their states, and the managers, which are the only writers of the states."""
