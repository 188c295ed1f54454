"""Matrix products whose rows do not depend on each other."""
