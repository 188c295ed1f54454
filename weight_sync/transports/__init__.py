"""The sending side of every path."""
