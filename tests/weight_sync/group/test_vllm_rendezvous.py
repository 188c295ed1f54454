"""The way into a communicator of vLLM's trainers, which are restated in `support.vllm.trainer`, with gloo for NCCL."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.vllm.trainer import HOST, KEY, GlooCommunicators, VllmTrainer, id_of, pickled, unpickled
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.communicator import Connected
from lockstep.weight_sync.group.registry import GroupRegistry
from lockstep.weight_sync.group.vllm_rendezvous import VllmRendezvous
from lockstep.weight_sync.group.weight_group import WeightGroup

GLOO = GlooCommunicators()
LATE_S = 1.0  # of waits that must fail; the tests bound them by SOON_S
SOON_S = 8.0


@pytest.fixture
def trainer() -> Iterator[VllmTrainer]:
    made = VllmTrainer()
    yield made
    made.close()


def worker(trainer: VllmTrainer, rank: int = 1, timeout_s: float = 20.0) -> VllmRendezvous:
    return VllmRendezvous(GLOO, rank, trainer.world_size, address=(HOST, trainer.port), timeout_s=timeout_s)


def received(group: WeightGroup) -> float:
    tensor, deadline = torch.zeros(1000), Deadline.after(10)
    group.finish(group.broadcast(tensor, deadline), deadline)
    return tensor.unique().item()


def fails(joining: Future) -> str:
    """Return the error of a join, which must come in time."""
    started = time.monotonic()
    with pytest.raises(TransferFailed) as caught:
        soon(joining)
    assert time.monotonic() - started < SOON_S
    return str(caught.value)


def test_a_worker_joins_by_the_trainers_store(trainer):
    joining = submit(worker(trainer).join)
    trainer.join()
    group = soon(joining)
    for value in (3.0, 5.0):
        sending = submit(trainer.broadcast, torch.full((1000,), value))
        assert received(group) == value
        soon(sending)
    assert (group.rank, group.world_size, group.backend) == (1, 2, "gloo")
    group.destroy()


def test_every_worker_of_a_larger_group_joins():
    trainer = VllmTrainer(4)
    joining = [submit(worker(trainer, rank).join) for rank in (1, 2, 3)]
    trainer.join()
    groups = [soon(one) for one in joining]
    receiving = [submit(received, group) for group in groups]
    trainer.broadcast(torch.full((1000,), 7.0))
    assert [soon(one) for one in receiving] == [7.0] * 3
    for group in groups:
        group.destroy()
    trainer.close()


def test_a_worker_joins_by_an_id_without_a_store(trainer):
    rendezvous = VllmRendezvous(GLOO, 1, 2, unique_id=trainer.unique_id, timeout_s=20)
    joining = submit(rendezvous.join)
    trainer.connect()
    group = soon(joining)
    sending = submit(trainer.broadcast, torch.full((1000,), 2.0))
    assert received(group) == 2.0
    soon(sending)
    assert rendezvous.port == 0
    group.destroy()


def test_our_rank_0_says_its_id_as_vllm_does_and_waits_for_its_workers():
    sender = VllmRendezvous(GLOO, 0, 2, address=(HOST, 0), timeout_s=20)
    sending = submit(sender.join)
    # A worker of vLLM: it counts itself in, reads the object, connects and warms up.
    store = dist.TCPStore(HOST, sender.port, 2, False, use_libuv=False)
    unique_id = unpickled(store.get(KEY))
    connected = GLOO.connect(unique_id, 1, 2, Deadline.after(20))
    connected.lane.allreduce([torch.zeros(1)], dist.AllreduceOptions()).wait(Deadline.after(20).left)
    group = soon(sending)
    tensor = torch.full((1000,), 4.0)
    work = group.broadcast(tensor, Deadline.after(20))
    target, options = torch.zeros(1000), dist.BroadcastOptions()
    connected.lane.broadcast([target], options).wait(Deadline.after(20).left)
    group.finish(work, Deadline.after(20))
    assert target.unique().tolist() == [4.0]
    group.destroy()


# -- what fails, and how soon ------------------------------------------------------------------------------------------


def test_a_trainer_that_never_comes_is_named():
    port = free_port()
    error = fails(submit(VllmRendezvous(GLOO, 1, 2, address=(HOST, port), timeout_s=LATE_S).join))
    assert f"rank 1 of group 'vllm_weight_transfer', rendezvous at {HOST}:{port}: deadline of 1 s passed" in error
    assert error.endswith("ranks that had not arrived: 0")


def test_a_trainer_that_sets_no_id_is_named(trainer):
    joining = submit(worker(trainer, timeout_s=LATE_S).join)
    trainer.open()
    error = fails(joining)
    assert f"the trainer has not set its NCCL id (key '{KEY}')" in error
    assert error.endswith("ranks that had not arrived: 0")


def test_a_trainer_that_ends_before_its_id_is_noticed_at_once(trainer):
    joining = submit(worker(trainer, timeout_s=30).join)
    trainer.open()
    trainer.close()
    error = fails(joining)
    assert "the trainer has not set its NCCL id" in error and "deadline" not in error


def test_a_trainer_that_accepts_and_is_silent_does_not_hold_the_caller():
    with socket.create_server((HOST, 0)) as silent:
        rendezvous = VllmRendezvous(GLOO, 1, 2, address=silent.getsockname()[:2], timeout_s=LATE_S)
        error = fails(submit(rendezvous.join))
    assert "deadline of 1 s passed" in error and error.endswith("ranks that had not arrived: 0")


def test_ranks_that_do_not_connect_after_the_id_are_named(trainer):
    joining = submit(worker(trainer, timeout_s=LATE_S).join)
    trainer.open()
    trainer.say(pickled(trainer.unique_id))
    assert fails(joining).endswith("ranks that had not arrived: 0")


def test_a_trainer_that_does_not_warm_up_is_named(trainer):
    joining = submit(worker(trainer, timeout_s=2 * LATE_S).join)
    trainer.join(warm_up=False)
    error = fails(joining)
    assert "summing a number with the other ranks" in error and error.endswith("ranks that had not arrived: 0")


def test_where_nccl_blocks_the_error_says_that_it_does_not_know_the_rank():
    held, release = threading.Event(), threading.Event()

    class Blocked(GlooCommunicators):
        def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
            held.set()
            release.wait(60)
            raise RuntimeError("it ended")

    joining = submit(VllmRendezvous(Blocked(), 1, 3, unique_id=id_of(1), timeout_s=LATE_S).join)
    assert held.wait(10)
    error = fails(joining)
    release.set()
    assert "NCCL waits for other ranks" in error and error.endswith("some of 0, 2 (NCCL does not say which)")


class _Hostile:
    def __reduce__(self):
        return os._exit, (1,)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (pickle.dumps(_Hostile()), "blocked unsafe global posix._exit"),
        (pickle.dumps(bytes(128)), "something else"),
        (pickle.dumps("no id"), "something else"),
        (b"no pickle", f"the trainer's NCCL id (key '{KEY}') cannot be read"),
        (bytes(8000), "4096"),
    ],
)
def test_an_id_that_is_none_ends_the_join(trainer, value, why):
    joining = submit(worker(trainer).join)
    trainer.open()
    trainer.say(value)
    assert why in fails(joining)


def test_a_join_is_cancelled_in_each_phase(trainer):
    registry = GroupRegistry()
    for step in (lambda: None, trainer.open):
        joining = submit(registry.init, worker(trainer, timeout_s=60))
        step()
        wait_until(lambda: registry.state() == {"vllm_weight_transfer": "joining"})
        registry.destroy("vllm_weight_transfer")
        assert "cancelled" in fails(joining)
        assert registry.state() == {}


def test_a_group_that_is_complete_too_late_is_destroyed(trainer):
    connected, go_on = threading.Event(), threading.Event()

    class Late(GlooCommunicators):
        def connect(self, unique_id: bytes, rank: int, world_size: int, deadline: Deadline) -> Connected:
            made = super().connect(unique_id, rank, world_size, Deadline.after(20))
            connected.set()
            go_on.wait(20)
            return made

    rendezvous = VllmRendezvous(Late(), 1, 2, unique_id=trainer.unique_id, timeout_s=LATE_S)
    joining, training = submit(rendezvous.join), submit(trainer.connect)
    assert connected.wait(20)
    assert "deadline of 1 s passed" in fails(joining)
    go_on.set()
    with pytest.raises(RuntimeError):
        soon(training)  # its sum fails, for this rank has left


def test_every_bad_argument_is_named():
    with pytest.raises(ValueError) as caught:
        VllmRendezvous(GLOO, 3, 2, timeout_s=1)
    for part in ("rank 3", "address of the trainer's store or the unique id"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="master_port 0"):
        VllmRendezvous(GLOO, 1, 2, address=(HOST, 0))
    with pytest.raises(ValueError, match="rank 0 makes the unique id"):
        VllmRendezvous(GLOO, 0, 2, unique_id=id_of(1))
