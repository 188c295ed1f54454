"""The layout of tensors in bytes: buckets, shards, byte ranges."""
