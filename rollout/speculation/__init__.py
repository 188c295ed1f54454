"""Room of drafts: who proposes tokens, and how many of them a step takes."""
