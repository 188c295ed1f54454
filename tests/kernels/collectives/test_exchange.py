"""Tests of exchanges through shared memory: equal bits on all processes, and no process that waits without end."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lockstep.kernels.collectives import exchange
from lockstep.kernels.collectives.exchange import SLOT_BYTES, SharedMemory, exchange_bytes
from lockstep.kernels.linear.linear import add_blocks
from lockstep.kernels.machine import native
from lockstep.tests.support.forked_ranks import run_ranks

pytestmark = pytest.mark.skipif(native.load(exchange.SOURCE) is None, reason="needs a C++ compiler")


def run_processes(
    num_ranks: int, run: Callable[[SharedMemory], object], timeout_s: float = 30.0, **how
) -> list[object]:
    """Run the function in processes that share memory; returns their results, or the texts of their errors."""
    memory = mmap.mmap(-1, exchange_bytes(num_ranks))
    ranks = [
        partial(lambda rank: run(SharedMemory(memory, num_ranks, rank, timeout_s)), rank) for rank in range(num_ranks)
    ]
    return run_ranks(*ranks, **how)


def numbers(rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


SHAPES = [(1, 1, 3), (2, 5, 37), (1, 32, 768), (2, 3, SLOT_BYTES // 3 + 7)]  # the last: several pieces


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_process_gets_the_bits_of_one_that_adds_all_blocks_in_order(num_ranks: int, dtype: torch.dtype) -> None:
    biases = [None, numbers(9, 37, dtype=dtype), numbers(8, 32, 768, dtype=torch.float32), None]

    def run(memory: SharedMemory) -> bool:
        for shape, bias in zip(SHAPES, biases, strict=True):
            parts = [numbers(rank, *shape, dtype=dtype) for rank in range(num_ranks)]
            for _ in range(3):
                if not torch.equal(memory.add(parts[memory.rank], bias), add_blocks(torch.cat(parts), bias)):
                    return False
                if not torch.equal(memory.gather(parts[memory.rank]), torch.stack(parts)):
                    return False
        return True

    assert run_processes(num_ranks, run) == [True] * num_ranks


def test_a_process_that_does_not_come_is_named_after_the_time_limit() -> None:
    part = torch.ones(3)
    results = run_processes(2, lambda memory: memory.gather(part) if memory.rank else "away", timeout_s=0.3)
    assert results == ["away", "ExchangeFailed: process 0 of 2 did not take part in an exchange for 0.3 s"]


def test_a_wait_ends_as_soon_as_it_is_stopped() -> None:
    def run(memory: SharedMemory) -> object:
        if memory.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.2, memory.stop).start()
        began = time.monotonic()
        with pytest.raises(
            exchange.ExchangeFailed, match="process 1 of 2 did not take part in an exchange before it was"
        ):
            memory.add(torch.ones(1, 3), None)
        return time.monotonic() - began < 15.0

    assert run_processes(2, run) == [True, None]


def test_processes_that_make_different_exchanges_are_told_so() -> None:
    [first, second] = run_processes(2, lambda memory: memory.gather(torch.ones(3 + memory.rank)))
    assert first == "ExchangeFailed: process 1 of 2 takes part in another exchange than process 0"
    assert second == "ExchangeFailed: process 0 of 2 takes part in another exchange than process 1"


def test_recorded_exchanges_are_played_without_the_other_processes() -> None:
    def run(memory: SharedMemory) -> bool:
        mine = numbers(memory.rank, 2, 5, dtype=torch.float32)
        with memory.recorded() as tape:
            expected = [memory.add(mine, None), memory.gather(mine)]
        for _ in range(3 if memory.rank else 0):  # process 0 takes no part
            with memory.played(tape):
                if not all(map(torch.equal, [memory.add(mine, None), memory.gather(mine)], expected)):
                    return False
        return torch.equal(memory.gather(mine), expected[1])

    assert run_processes(2, run) == [True, True]
