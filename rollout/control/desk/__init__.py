"""The desk of an engine: the way of callers' requests to the loop, and of chunks and answers back to them."""
