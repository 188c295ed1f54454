"""Keys, bodies, settings and errors at the edge; all that the router imports of http."""
