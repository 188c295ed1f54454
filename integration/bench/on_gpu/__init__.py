"""Parts of the benchmark of a GPU: times on the device, kernels, and a report that is written as it grows."""
