"""`lockstep route`: one address for many engines. A generation goes to one engine, administration to all."""
