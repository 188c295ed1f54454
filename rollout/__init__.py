"""The engine: requests, scheduling, paged KV, sampling and the loop that joins them."""
