"""Forked processes with one thread as ranks of a test that end, hang or refuse. Other tests use `run_world`."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.integration.bench.parts.ports import free_ports
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.weight_group import WeightGroup

_FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def join_group(*arguments: Any, **settings: Any) -> WeightGroup:
    """Join the group of `Rendezvous(...)` and return it when all ranks are there. Blocks; raises as both methods do."""
    return Rendezvous(*arguments, **settings).join()


def run_ranks(*ranks: Callable[[], object], num_endless: int = 0, timeout_s: float = 20.0) -> list[object]:
    """Run each callable in a process; returns its result, the text of its error, or None if it was killed or hangs.

    The last `num_endless` are not waited for: they are killed when the others are done.
    """

    def answer(rank: Callable[[], object]) -> object:
        try:
            return rank()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    end, results = time.monotonic() + timeout_s, []
    with _forked([partial(answer, rank) for rank in ranks]) as pipes:
        for index, pipe in enumerate(pipes):
            left_s = max(0.0, end - time.monotonic()) if index < len(ranks) - num_endless else 0.0
            try:
                results.append(pipe.recv() if pipe.poll(left_s) else None)
            except EOFError:
                results.append(None)
    return results


def run_survivors(
    num_ranks: int, folder: Path, rank_function: Callable[[int], object], victim: int, timeout_s: float = 120.0
) -> dict[int, object]:
    """Run the ranks of a default group (gloo); returns the result or the error of each, without the victim.

    A rank ends as soon as it has its result. Fails if one is not done in `timeout_s`.
    """

    def answer(rank: int) -> object:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks,
                                timeout=timedelta(seconds=60))  # fmt: skip
        try:
            return rank_function(rank)
        except (RuntimeError, ValueError) as error:
            return error

    end, results = time.monotonic() + timeout_s, {}
    with _forked([partial(answer, rank) for rank in range(num_ranks)]) as pipes:
        for rank, pipe in enumerate(pipes):
            if rank != victim:
                assert pipe.poll(max(end - time.monotonic(), 0.0)), f"rank {rank} was not done in {timeout_s} s"
                results[rank] = pipe.recv()
    return results


@contextmanager
def _forked(answers: Sequence[Callable[[], object]]) -> Iterator[list[Connection]]:
    """Fork a process for each answer. It sends the answer and exits at once; all are killed at the end."""

    def child(answer: Callable[[], object], out: Connection) -> None:
        torch.set_num_threads(1)
        out.send(answer())
        out.close()
        os._exit(0)

    processes, pipes = [], []
    try:
        for answer in answers:
            ours, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=child, args=(answer, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
