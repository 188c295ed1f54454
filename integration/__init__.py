"""Where the rooms meet: the service, the training job and the command line."""
