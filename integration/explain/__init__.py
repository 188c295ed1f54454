"""Run one sequence in two ways and find the first operation whose numbers differ."""
