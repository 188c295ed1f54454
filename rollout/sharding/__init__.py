"""The part of the module that a rank has."""
