"""From a trainer to its engines."""
