"""Keys, bodies, settings and errors of requests; the only part of http that the router imports."""
