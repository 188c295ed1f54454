"""Measured peak rates of a machine, from which the floors of a decode step are computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .device_time import device_ms

_BUFFER_BYTES = 512 * 2**20  # larger than every cache
_PRODUCT_SIZE = 2048
_GPU_BUFFER_BYTES = 2 * 2**30
_GPU_PRODUCT_SIZE = 8192  # a smaller product is over before a GPU runs at its rate


@dataclass(frozen=True)
class Peaks:
    """Peak rates of one device, at the number of threads that torch has now."""

    bytes_per_s: float  # read from memory
    operations_per_s: float  # multiplications and additions of a large matrix product

    def floor_seconds(self, num_bytes: float, num_operations: float) -> float:
        """Return the least time of a program with these bytes and operations, if memory and units work in parallel."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


def measure_peaks(dtype: torch.dtype, device: torch.device, repeats: int = 5) -> Peaks:
    """Read a large buffer and multiply large matrices of that dtype; the best of the repeats counts.

    On a GPU the buffer is copied by the copy engine and by a kernel, and added up; the best counts. The matrices are
    random, since products of equal numbers take less power than others.
    """
    if device.type == "cuda":
        return _measure_gpu(dtype, device)
    buffer = torch.ones(_BUFFER_BYTES // 8, dtype=torch.int64, device=device)
    reading = _best(lambda: buffer.sum(), device, repeats)
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)
    product = _best(lambda: matrix @ matrix, device, repeats)
    return Peaks(buffer.nbytes / reading, 2 * _PRODUCT_SIZE**3 / product)


def _measure_gpu(dtype: torch.dtype, device: torch.device) -> Peaks:
    source = torch.randn(_GPU_BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copying = device_ms([lambda: target.copy_(source)], device) / 2
    adding = device_ms([lambda: torch.add(source, 1.0, out=target)], device) / 2
    reading = min(copying, adding, device_ms([lambda: source.sum()], device)) / 1e3
    left, right = (torch.randn(_GPU_PRODUCT_SIZE, _GPU_PRODUCT_SIZE, device=device).to(dtype) for _ in range(2))
    product = device_ms([lambda: left @ right], device) / 1e3
    return Peaks(source.nbytes / reading, 2 * _GPU_PRODUCT_SIZE**3 / product)


def _best(act: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest of the repeats, after one more to warm up."""
    act()
    seconds = []
    for _ in range(repeats):
        _settle(device)
        started = time.perf_counter()
        act()
        _settle(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
