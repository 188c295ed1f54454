"""What benchmarks are made of: loads, presets, machines, peers, reports."""
