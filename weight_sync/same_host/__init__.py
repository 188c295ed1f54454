"""Shared memory and CUDA IPC."""
