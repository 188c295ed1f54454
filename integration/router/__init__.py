"""`lockstep route`: one address for many engines. Generation goes to one of them, administration to all."""
