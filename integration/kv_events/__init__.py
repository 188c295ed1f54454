"""The prefix cache's events on a ZeroMQ socket."""
