"""A torch.distributed job of forked processes. `forked_ranks` is for ranks that end, hang or refuse."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def run_world(num_ranks: int, rank_function: Callable[[int], object], timeout_s: float = 120.0) -> list[object]:
    """Return the result of rank_function(rank) on each rank of a torch.distributed job (gloo).

    Each rank is a forked process with one thread and a default group. Fails with the exit codes if a rank raised, ended
    early, or was not done in `timeout_s`. Results must pickle; tensors are copied through a file.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank_function, rank, num_ranks, folder, timeout_s), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _results_of(processes, folder, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run_rank(rank_function: Callable[[int], object], rank: int, num_ranks: int, folder: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    init, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.save(rank_function(rank), f"{folder}/result.{rank}")
    dist.barrier()  # no rank ends while another still sends to it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _results_of(processes: list[multiprocessing.Process], folder: str, timeout_s: float) -> list[object]:
    running, end = {process.sentinel for process in processes}, time.monotonic() + timeout_s
    while running:
        ended = multiprocessing.connection.wait(running, max(0.0, end - time.monotonic()))
        running -= set(ended)
        codes = [process.exitcode for process in processes]
        if not ended or any(codes):
            pytest.fail(f"a rank failed, or was not done in {timeout_s:g} s; exit codes by rank: {codes}")
    return [torch.load(f"{folder}/result.{rank}", weights_only=False) for rank in range(len(processes))]
