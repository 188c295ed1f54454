"""verl's trainer on Lockstep's engine: servers of its rollouts, updates of their weights, and the trainer's forward."""
