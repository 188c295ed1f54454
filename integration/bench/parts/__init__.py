"""Parts of benchmarks: loads, presets, machines, peers, reports."""
