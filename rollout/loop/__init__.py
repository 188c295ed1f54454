"""One step after another, and what may happen between two."""
