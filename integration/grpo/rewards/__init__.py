"""The rewards of a job: its own and ready ones, each loaded by its name, asked once for many completions."""
