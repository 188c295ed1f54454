"""The trust boundary: payloads of other frameworks, read and never executed."""
