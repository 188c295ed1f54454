"""What an engine tells of itself: counters, latencies, traces, views."""
