"""From a trainer's model to named tensors: one file for each way of wrapping or sharding it."""
