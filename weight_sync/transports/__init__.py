"""The sending side of every path of an update."""
