"""One benchmark a file, run by `lockstep bench NAME`."""
