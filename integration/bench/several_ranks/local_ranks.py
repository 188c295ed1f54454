"""Processes of this machine as the ranks of a benchmark's replica; the calling process is rank 0."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT_S = 120.0
_END_S = 10.0  # that the other ranks have to end


@contextmanager
def local_ranks(num_ranks: int, follow: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run `follow(*arguments)` on the other ranks, with one thread each, and make this process rank 0, with one thread.

    The ranks have a default process group meanwhile. follow: a function of a module, for it runs in a new process.
    """
    num_threads = torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        others = [
            context.Process(target=_follow, args=(folder, rank, num_ranks, follow, arguments), daemon=True)
            for rank in range(1, num_ranks)
        ]
        for other in others:
            other.start()
        try:
            with _world(folder, 0, num_ranks):
                yield
        finally:
            torch.set_num_threads(num_threads)
            for other in others:
                other.join(_END_S)
                if other.is_alive():
                    other.kill()
                    other.join()


def _follow(folder: str, rank: int, num_ranks: int, follow: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with _world(folder, rank, num_ranks):
        follow(*arguments)


@contextmanager
def _world(folder: str, rank: int, num_ranks: int) -> Iterator[None]:
    torch.set_num_threads(1)
    limit = timedelta(seconds=_TIMEOUT_S)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()
