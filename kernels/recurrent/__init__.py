"""Layers with a state: the causal convolution, the gated delta rule and state spaces, in one arithmetic for any cut."""
