"""Conversations whose tokens stand as they were sampled: sessions, their turns, and the prompts of next turns."""
