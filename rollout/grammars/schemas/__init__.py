"""JSON schemas: the check that the grammar engine enforces every keyword of one."""
