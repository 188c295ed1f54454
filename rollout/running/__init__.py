"""One step on one rank: batch, forward, draws, recorded decode steps."""
