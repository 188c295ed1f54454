"""Moving weights: digests, manifests, wires and transactions over named tensors."""
