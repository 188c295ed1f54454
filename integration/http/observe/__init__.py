"""Health, model and server information, metrics, the debug page."""
