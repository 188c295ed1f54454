"""Receipts proven by a replay: what is checked of each, weights found by their digest, and the report."""
