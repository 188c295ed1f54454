"""The job's settings: TOML, overrides, and what is refused."""
