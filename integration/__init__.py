"""The outer layer: the service, its HTTP server, the training job and the command line."""
