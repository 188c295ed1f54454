"""Updates that take effect whole or are undone."""
