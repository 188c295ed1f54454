"""The check of a hosted module when an engine is made: it computes what it computes without the engine."""
