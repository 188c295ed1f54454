"""Reports of an engine: counters, latencies, traces, views."""
