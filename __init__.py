"""Lockstep: a rollout engine that samples with the very model being trained, and can prove it."""
