"""Recurrent layers: causal convolution and state updates whose rows depend on their own sequence only."""
