"""Environments of other packages, as environments of the job: `environment = "textarena"` and the like."""
