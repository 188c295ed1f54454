"""Layers with a state: the causal convolution and the gated delta rule, in one arithmetic for any cut of a sequence."""
