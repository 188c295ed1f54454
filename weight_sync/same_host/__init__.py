"""The hand-over on one host: shared memory and CUDA IPC."""
