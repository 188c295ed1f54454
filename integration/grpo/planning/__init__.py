"""The plan of a job, checked and described before it starts."""
