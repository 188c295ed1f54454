"""Which part of the module a rank has."""
