"""Benchmarks, one a file, run by `lockstep bench NAME`."""
