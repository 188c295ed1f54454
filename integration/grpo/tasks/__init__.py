"""The tasks of a job: its problems, and the model that is built for them."""
