"""Worker threads of generators: what has begun is waited for, the rest is dropped, and the garbage collector may close
them anywhere."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.tests.support import prepared_python
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender
from lockstep.weight_sync.workers import Workers, in_order

TENSORS = [("a", torch.arange(4096)), ("b", torch.arange(4096))]


def forget_in_a_cycle(folder: str) -> None:
    """Begin an update and a delta, each in a reference cycle, and let them be found under the lock of `threading`."""
    sender = SharedMemorySender(4096, folder)
    for begun in (
        sender.buckets(TENSORS, Manifest("v", specs_of(TENSORS))),
        encode_delta(TENSORS, [(name, tensor + 1) for name, tensor in TENSORS], chunk_bytes=64),
    ):
        next(begun)
        cycle: list[object] = [begun]
        cycle.append(cycle)
    del begun, cycle
    with getattr(threading, "_shutdown_locks_lock", threading.Lock()):  # CPython 3.11 and 3.12; no longer in 3.13
        gc.collect()
    print(len(list(sender.buckets(TENSORS, Manifest("w", specs_of(TENSORS))))))
    sender.close()


def test_a_forgotten_generator_can_be_collected_anywhere(tmp_path):
    root = Path(lockstep.__file__).parent.parent
    process = prepared_python.Popen(
        [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(root)}
    )
    try:
        answer, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert int(answer) == 32  # buckets of 2 KiB


def test_the_end_waits_for_what_has_begun_and_drops_the_rest():
    begun, go, ended = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        begun.set()
        assert go.wait(20)
        ended.append(number)

    with Workers(1, "test") as workers:
        futures = [workers.submit(work, number) for number in range(3)]
        assert begun.wait(20)
        threading.Timer(0.05, go.set).start()
    assert ended == [0]
    assert [future.cancelled() for future in futures] == [False, True, True]


def test_a_worker_that_closes_its_own_pool_does_not_wait_for_itself():
    with Workers(1, "test") as workers:
        assert workers.submit(workers.__exit__).result(20) is None


@pytest.mark.parametrize("num_threads", [1, 3])
def test_results_come_in_order_and_only_a_few_ahead(num_threads):
    started = []

    def square(number: int) -> int:
        started.append(number)
        return number * number

    with Workers(num_threads, "test") as workers:
        results = in_order(workers, square, range(50), num_threads)
        assert next(results) == 0
        assert len(started) <= num_threads + 1
        assert list(results) == [number * number for number in range(1, 50)]


if __name__ == "__main__":
    forget_in_a_cycle(sys.argv[1])
