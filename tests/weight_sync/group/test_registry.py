"""Groups that are joined, cancelled, refused and broken, every rank in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.integration.bench.parts.ports import HOST
from lockstep.tests.support.forked_ranks import free_port, join_group, run_ranks
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.registry import GroupRegistry
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.shared_keys import SharedKeys
from lockstep.weight_sync.group.weight_group import WeightGroup


def broadcast(group: WeightGroup, value: float, timeout_s: float = 5.0) -> float:
    tensor = torch.full((1000,), value)
    deadline = Deadline.after(timeout_s)
    group.finish(group.broadcast(tensor, deadline), deadline)
    return tensor.unique().item()


def foreign_group(port: int, rank: int, world_size: int, name: str) -> dist.ProcessGroup:
    """Join as a trainer's end: the steps of SGLang's init_custom_process_group, private names included."""
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=10)
    store, rank, world_size = next(rendezvous(f"tcp://{HOST}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def test_three_ranks_hold_two_groups_at_once_and_join_again_under_the_same_name() -> None:
    ports = {"a": free_port(), "b": free_port()}
    again = free_port()

    def rank(index: int) -> list[float]:
        groups = {n: join_group(HOST, p, index, 3, n, timeout_s=10) for n, p in ports.items()}
        seen = [broadcast(groups["b"], 10.0 + index), broadcast(groups["a"], 20.0 + index)]
        groups["a"].destroy()
        group = join_group(HOST, again, index, 3, "a", timeout_s=10)
        seen += [broadcast(group, 30.0 + index), broadcast(groups["b"], 40.0 + index)]
        return seen

    assert run_ranks(*(lambda i=i: rank(i) for i in range(3))) == [[10.0, 20.0, 30.0, 40.0]] * 3


@pytest.mark.parametrize("foreign", [0, 2])
def test_ends_built_by_the_trainers_recipe_meet_ours(foreign: int) -> None:
    port = free_port()

    def theirs() -> float:
        group = foreign_group(port, foreign, 3, "slime-pp_0")
        tensor = torch.full((1000,), 7.0 + foreign)
        dist.broadcast(tensor, group=group, group_src=0)
        return tensor.unique().item()

    def ours(rank: int) -> float:
        return broadcast(join_group(HOST, port, rank, 3, "slime-pp_0", timeout_s=10), 7.0 + rank)

    assert run_ranks(*(theirs if i == foreign else (lambda i=i: ours(i)) for i in range(3))) == [7.0] * 3


def test_a_rank_that_never_comes_is_named_by_the_others_at_their_deadline() -> None:
    port = free_port()  # chance decides which of the two gives up first
    for said in run_ranks(*(lambda i=i: join_group(HOST, port, i, 4, "g", timeout_s=1.5) for i in range(2))):
        assert "group 'g', rendezvous" in said and "TransferFailed" in said
        assert "had not arrived: 2, 3" in said


def test_a_host_that_is_not_there_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(TransferFailed, match=r"rank 1 of group 'g', rendezvous.*had not arrived: 0"):
        join_group(HOST, free_port(), 1, 2, "g", timeout_s=0.5)
    assert time.monotonic() - began < 9


def test_a_rank_that_connects_to_itself_keeps_looking_for_the_host(monkeypatch) -> None:
    port, sockets, looked_again = free_port(), [], multiprocessing.get_context("fork").Event()

    def from_the_port_it_looks_for(address: tuple[str, int], timeout: float) -> socket.socket:
        """Connect as the system may let it happen where the port is one of those that it gives out."""
        if sockets:
            looked_again.set()
        sockets.append(connect(address, timeout, address if not sockets else None))
        return sockets[-1]

    def rank(index: int) -> float:
        if index == 1:
            monkeypatch.setattr(socket, "create_connection", from_the_port_it_looks_for)
        else:
            assert looked_again.wait(10), "rank 1 has not given up the connection to itself"
        return broadcast(join_group(HOST, port, index, 2, "g", timeout_s=10), 3.0 + index)

    connect = socket.create_connection
    assert run_ranks(lambda: rank(0), lambda: rank(1)) == [3.0, 3.0]


@pytest.mark.parametrize("obstacle", ["no host", "missing rank", "silent host"])
def test_cancel_ends_a_rendezvous_that_waits(obstacle: str) -> None:
    def rank() -> tuple[float, str, list[str]]:
        port, index = free_port(), 0 if obstacle == "missing rank" else 1
        listener = socket.create_server((HOST, port)) if obstacle == "silent host" else None
        rendezvous = Rendezvous(HOST, port, index, 2, "g", timeout_s=60)
        timer = threading.Timer(0.3, rendezvous.cancel)
        timer.start()
        began = time.monotonic()
        try:
            rendezvous.join()
        except TransferFailed as error:
            said = str(error)
        took = time.monotonic() - began
        if listener is not None:  # a thread that torch blocks ends with its connection
            accepted = [listener.accept()[0] for _ in range(2)]
            for connection in (*accepted, listener):
                connection.close()
        kept = (threading.current_thread().name, "lockstep-clock")  # a process has one clock until its end
        others = [thread for thread in threading.enumerate() if thread.name not in kept]
        for thread in others:
            thread.join(5)
        socket.create_server((HOST, port)).close()  # and the port is free again
        return took, said, [thread.name for thread in others if thread.is_alive()]

    ((took, said, threads),) = run_ranks(rank)
    assert took < 20
    assert "cancelled" in said and f"had not arrived: {1 if obstacle == 'missing rank' else 0}" in said
    assert threads == []


def test_a_cancelled_rank_leaves_no_half_group_to_the_one_that_comes_next() -> None:
    port, later = free_port(), free_port()

    def rank(index: int) -> float:
        if index == 1:
            rendezvous = Rendezvous(HOST, port, 1, 2, "g", timeout_s=60)
            threading.Timer(0.2, rendezvous.cancel).start()
            with pytest.raises(TransferFailed, match="cancelled"):
                rendezvous.join()
        return broadcast(join_group(HOST, later, index, 2, "g", timeout_s=10), 3.0)

    assert run_ranks(lambda: rank(0), lambda: rank(1)) == [3.0, 3.0]


def test_ranks_that_disagree_about_the_world_size_all_hear_of_it_at_once() -> None:
    port, began = free_port(), time.monotonic()
    said = run_ranks(
        lambda: join_group(HOST, port, 0, 3, "g", timeout_s=15), lambda: join_group(HOST, port, 1, 2, "g", timeout_s=15)
    )
    assert all("rank 1 joins a group of 2, rank 0 one of 3" in text for text in said)
    assert time.monotonic() - began < 10


def test_the_host_of_a_refused_rendezvous_waits_until_those_who_signed_have_heard(monkeypatch) -> None:
    def slow(self: Rendezvous, roster: SharedKeys) -> str | None:
        if self._rank == 1:
            threading.Event().wait(0.2)
        return read(self, roster)

    read = Rendezvous._read_refusal
    monkeypatch.setattr(Rendezvous, "_read_refusal", slow)
    port = free_port()
    said = run_ranks(*(lambda i=i: join_group(HOST, port, i, 3 if i < 2 else 4, "g", timeout_s=15) for i in range(3)))
    assert all("rank 2 joins a group of 4, rank 0 one of 3" in text for text in said), said


def test_a_rank_that_joins_twice_is_an_error_everywhere() -> None:
    port = free_port()
    said = run_ranks(*(lambda i=i: join_group(HOST, port, i, 3, "g", timeout_s=15) for i in (0, 1, 1)))
    assert all("rank 1 joined twice" in text for text in said)


def test_a_host_that_is_stopped_while_others_join_cannot_hold_them() -> None:
    port = free_port()

    def host() -> None:
        store = dist.TCPStore(HOST, port, 3, True, wait_for_workers=False)
        store.wait(["lockstep/g/joined/1"], timedelta(seconds=10))
        os.kill(os.getpid(), signal.SIGSTOP)

    def joiner() -> tuple[float, str]:
        began = time.monotonic()
        try:
            join_group(HOST, port, 1, 3, "g", timeout_s=1.5)
        except TransferFailed as error:
            return time.monotonic() - began, str(error)
        raise AssertionError("joined a stopped host")

    (took, said), _ = run_ranks(joiner, host, num_endless=1)
    assert took < 9
    assert "does not answer" in said and "had not arrived: 0" in said


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_abort_and_destroy_end_a_broadcast_on_both_sides(how: str) -> None:
    port = free_port()

    def rank(index: int) -> tuple[float, str, str]:
        group = join_group(HOST, port, index, 2, "g", timeout_s=10)
        broadcast(group, 1.0)
        began = time.monotonic()
        if index == 0:
            broadcast(group, 2.0)
            if how == "abort":
                group.abort("of a test")
            else:
                group.destroy()
        else:
            broadcast(group, 2.0)
            with pytest.raises(RuntimeError):
                broadcast(group, 3.0, timeout_s=15)
            group.abort("of a test")
        took = time.monotonic() - began
        try:
            broadcast(group, 4.0)
        except TransferFailed as error:
            group.destroy()
            group.destroy()
            return took, str(error), group.broken
        raise AssertionError("a broken group was used")

    for index, (took, said, broken) in enumerate(run_ranks(lambda: rank(0), lambda: rank(1))):
        assert took < 9
        assert f"rank {index} of group 'g'" in said and broken in said and "join a new one" in said


def test_abort_from_another_thread_ends_a_broadcast_that_nobody_joins() -> None:
    port = free_port()

    def rank(index: int) -> float | None:
        group = join_group(HOST, port, index, 2, "g", timeout_s=10)
        broadcast(group, 1.0)
        if index == 0:
            threading.Event().wait(10)
            return None
        threading.Timer(0.3, group.abort).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            broadcast(group, 2.0, timeout_s=30)
        group.destroy()
        return time.monotonic() - began

    assert run_ranks(lambda: rank(1), lambda: rank(0), num_endless=1)[0] < 3.0


def test_registry_knows_its_groups_and_destroys_what_is_still_joining() -> None:
    registry, raised = GroupRegistry(), []
    with pytest.raises(ValueError, match=r"^The group to be destroyed does not exist\.$"):
        registry.destroy("g")
    solo = registry.init(Rendezvous(HOST, free_port(), 0, 1, "g", timeout_s=5))
    assert registry.get("g") is solo
    with pytest.raises(ValueError, match="'g' exists already"):
        registry.init(Rendezvous(HOST, free_port(), 0, 1, "g", timeout_s=5))

    def join() -> None:
        try:
            registry.init(Rendezvous(HOST, free_port(), 1, 2, "pending", timeout_s=30))
        except TransferFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=join)
    thread.start()
    while "pending" not in registry._groups:
        threading.Event().wait(0.01)
    with pytest.raises(ValueError, match="'pending' is still joining; groups: g"):
        registry.get("pending")
    registry.destroy("pending")
    thread.join(5)
    assert "cancelled" in raised[0]
    registry.destroy("g")
    assert solo.broken == "it was destroyed"
    with pytest.raises(ValueError, match="'g' does not exist"):
        registry.get("g")
    again = registry.init(Rendezvous(HOST, free_port(), 0, 1, "g", timeout_s=5))
    registry.close()
    assert again.broken


def test_every_bad_argument_is_named() -> None:
    with pytest.raises(ValueError) as caught:
        join_group(HOST, 0, 3, 2, "", backend="mpi", layout="other", timeout_s=1)
    for part in ("rank 3", "master_port 0", "group_name", "backend 'mpi'", "layout 'other'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="CUDA device with an index"):
        join_group(HOST, 1, 0, 1, "g", backend="nccl")
    with pytest.raises(ValueError, match="timeout_s"):
        join_group(HOST, 1, 0, 1, "g", timeout_s=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_group_of_one_rank_broadcasts() -> None:
    # Of one rank, because NCCL refuses two ranks on one GPU.
    device = torch.device("cuda", 0)
    group = join_group(HOST, free_port(), 0, 1, "g", backend="nccl", device=device, timeout_s=60)
    tensor, deadline = torch.arange(4.0, device=device), Deadline.after(30)
    group.finish(group.broadcast(tensor, deadline), deadline)
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    group.destroy()


def test_a_group_whose_sender_has_ended_makes_way_for_another_one_of_its_name() -> None:
    ports, refused = (free_port(), free_port()), multiprocessing.get_context("fork").Event()

    def sender() -> None:
        first = join_group(HOST, ports[0], 0, 2, "g", timeout_s=10)
        assert refused.wait(30)
        first.destroy()
        second = join_group(HOST, ports[1], 0, 2, "g", timeout_s=10)
        broadcast(second, 2.0)
        second.destroy()

    def receiver() -> float:
        registry = GroupRegistry()
        assert not registry.init(Rendezvous(HOST, ports[0], 1, 2, "g", timeout_s=10)).has_lost_its_sender()
        with pytest.raises(ValueError, match="'g' exists already"):
            registry.init(Rendezvous(HOST, ports[1], 1, 2, "g", timeout_s=10))
        refused.set()
        while not registry.get("g").has_lost_its_sender():
            pass
        value = broadcast(registry.init(Rendezvous(HOST, ports[1], 1, 2, "g", timeout_s=10)), 0.0)
        registry.close()
        return value

    assert run_ranks(receiver, sender)[0] == 2.0
