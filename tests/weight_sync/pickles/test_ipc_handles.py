"""Tests of vLLM's IPC handles without a server: packed buffers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from multiprocessing import reduction

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lockstep.weight_sync.manifest import TensorSpec
from lockstep.weight_sync.pickles.ipc_handles import read_ipc_handles

SPECS = [TensorSpec("a", torch.float32, (2, 2)), TensorSpec("b", torch.uint8, (16,))]
SIZES = [16, 16]


@pytest.fixture(autouse=True)
def by_name() -> Iterator[None]:
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


def packed(flat: Tensor) -> bytes:
    """Pickle the handle of a packed buffer, as a trainer of vLLM does."""
    buffer = io.BytesIO()
    reduction.ForkingPickler(buffer, 3).dump({"cpu": reductions.reduce_tensor(flat)[1]})
    return buffer.getvalue()


def test_a_packed_buffer_is_cut_into_its_tensors():
    flat = torch.arange(32, dtype=torch.uint8)
    found = dict(read_ipc_handles(packed(flat), SPECS, torch.device("cpu"), tensor_sizes=SIZES))
    assert torch.equal(found["a"], flat[:16].view(torch.float32).view(2, 2)) and torch.equal(found["b"], flat[16:])


@pytest.mark.parametrize("step", [2, 0])
def test_a_packed_buffer_with_gaps_is_refused(step):
    flat = torch.zeros(64, dtype=torch.uint8).as_strided((32,), (step,))
    with pytest.raises(ValueError, match="the packed buffer must be contiguous"):
        read_ipc_handles(packed(flat), SPECS, torch.device("cpu"), tensor_sizes=SIZES)
