"""Communicators of NCCL: what can be checked of them without a GPU, and on one."""

from __future__ import annotations

import base64
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.tests.support.vllm.trainer import id_of
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.group.communicator import (
    NcclCommunicators,
    NcclLane,
    _check_single_id,
    _TimedWork,
    _without_watchdog,
    unique_id_of,
)
from lockstep.weight_sync.group.vllm_rendezvous import VllmRendezvous
from lockstep.weight_sync.group.weight_group import WeightGroup


def test_an_id_is_standard_base64_of_128_bytes():
    unique_id = id_of(5)
    assert unique_id_of(base64.b64encode(unique_id).decode()) == unique_id
    for text, why in (
        ("", "128 bytes; these are 0"),
        ("AAAA", "128 bytes; these are 3"),
        (base64.b64encode(bytes(129)).decode(), "these are 129"),
        (base64.urlsafe_b64encode(b"\xff" * 128).decode(), "not standard base64"),
        ("A", "not standard base64"),
        ("é" * 172, "not standard base64"),
    ):
        with pytest.raises(ValueError, match=why):
            unique_id_of(text)


def test_a_device_without_nccl_is_refused():
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="CUDA device with an index"):
            NcclCommunicators(torch.device(device))
    if not dist.is_nccl_available():
        with pytest.raises(ValueError, match="no NCCL"):
            NcclCommunicators(torch.device("cuda", 0))


def test_more_ranks_than_torch_connects_by_one_id_are_refused(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_RANKS_PER_ROOT", raising=False)
    _check_single_id(128)
    with pytest.raises(ValueError, match="TORCH_NCCL_RANKS_PER_ROOT=129"):
        _check_single_id(129)
    monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", "200")
    _check_single_id(200)


@pytest.mark.parametrize("before", [None, "0"])
def test_the_watchdog_is_off_only_while_a_group_is_constructed(monkeypatch, before):
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)

    def construct() -> None:
        with _without_watchdog():
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
            raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        construct()
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


class _Works:
    """An operation in the place of torch's, which counts a wait's timeout from its own start."""

    def __init__(self) -> None:
        self.timeouts: list[timedelta] = []
        self.done = threading.Event()

    def wait(self, timeout: timedelta) -> bool:
        self.timeouts.append(timeout)
        return self.done.wait(timeout.total_seconds())


class _Group:
    """A group in the place of torch's: an operation that is aborted looks done."""

    def __init__(self) -> None:
        self.work = _Works()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> _Works:
        return self.work

    def abort(self) -> None:
        self.work.done.set()


def _group_over(group: _Group) -> WeightGroup:
    lane = NcclLane(group)  # type: ignore[arg-type]
    return WeightGroup("g", 1, 2, "nccl", torch.device("cpu"), (lane,), (dist.HashStore(),))


def test_a_wait_lasts_as_long_as_the_caller_asks_though_the_operation_began_earlier():
    running = _Works()
    running.done.set()
    assert _TimedWork(running, time.monotonic() - 5).wait(timedelta(seconds=2))
    assert timedelta(seconds=7) <= running.timeouts[0] < timedelta(seconds=60)


def test_an_aborted_broadcast_is_a_failure_though_nccl_ends_it_as_a_success():
    made = _Group()
    group, deadline = _group_over(made), Deadline.after(30)
    work = group.broadcast(torch.zeros(1), deadline)
    group.abort("its update failed")
    with pytest.raises(RuntimeError, match="its update failed"):
        group.finish(work, deadline)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_communicator_of_one_rank_is_made_warmed_up_and_broadcasts() -> None:
    # Of one rank, because NCCL refuses two ranks on one GPU: rank 0 makes the id, says it and connects.
    device = torch.device("cuda", 0)
    group = VllmRendezvous(NcclCommunicators(device), 0, 1, address=("127.0.0.1", 0), timeout_s=60).join()
    tensor, deadline = torch.arange(4.0, device=device), Deadline.after(30)
    group.finish(group.broadcast(tensor, deadline), deadline)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    group.destroy()
