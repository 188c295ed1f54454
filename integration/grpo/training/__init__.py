"""The training of a step: packed samples, the loss and the update."""
