"""The trust boundary: payloads of other frameworks, parsed and never executed."""
