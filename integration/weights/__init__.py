"""The weight verbs behind the service."""
