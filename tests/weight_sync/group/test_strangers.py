"""Processes that reach a group's port and do not belong to it."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.integration.bench.parts.ports import HOST
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.forked_ranks import free_port, join_group, run_ranks
from lockstep.tests.support.random_models import random_model
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.registry import GroupRegistry
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.group.sealed_store import NotSealed, SealedStore
from lockstep.weight_sync.group.weight_group import WeightGroup


def broadcast(group: WeightGroup, value: float) -> float:
    tensor, deadline = torch.full((1000,), value), Deadline.after(5)
    group.finish(group.broadcast(tensor, deadline), deadline)
    return tensor.unique().item()


def listening_addresses(port: int) -> set[str]:
    """Return the addresses, in the kernel's notation, at which a process of this machine listens on a port."""
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, found in places if int(found, 16) == port}


def test_the_store_listens_at_its_address_and_at_no_other_one() -> None:
    rendezvous = Rendezvous(HOST, free_port(), 0, 1, "g", timeout_s=10)
    group = rendezvous.join()
    assert listening_addresses(rendezvous._address[1]) == {"0100007F"}
    group.destroy()


def test_a_port_of_the_systems_choice_is_taken_before_anybody_is_told_of_it() -> None:
    rendezvous = Rendezvous(HOST, 0, 0, 2, "g", timeout_s=10)
    assert listening_addresses(rendezvous.port) == {"0100007F"}
    with pytest.raises(TransferFailed, match=rf"cannot listen at {HOST}:{rendezvous.port} .*in use"):
        Rendezvous(HOST, rendezvous.port, 0, 2, "h", timeout_s=10)
    rendezvous.cancel()
    assert listening_addresses(rendezvous.port) == set()
    with pytest.raises(TransferFailed, match=r"cancelled \(its port is closed\)"):
        rendezvous.join()


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(TransferFailed, match=r"rank 0 of group 'g'.*192\.0\.2\.1.*must be an address of this machine"):
        Rendezvous("192.0.2.1", 0, 0, 2, "g", timeout_s=10)


def test_a_second_group_of_a_taken_name_leaves_no_open_port() -> None:
    registry = GroupRegistry()
    registry.init(Rendezvous(HOST, 0, 0, 1, "g", timeout_s=5))
    second = Rendezvous(HOST, 0, 0, 1, "g", timeout_s=5)
    with pytest.raises(ValueError, match="exists already"):
        registry.init(second)
    assert listening_addresses(second.port) == set()
    registry.close()


def test_ranks_with_the_secret_meet_beside_strangers_who_read_and_write_the_store() -> None:
    port, started = free_port(), "lockstep-test/started"

    def ours(rank: int) -> list[float]:
        if rank:
            dist.TCPStore(HOST, port, None, False, timedelta(seconds=10)).wait([started])
        group = join_group(HOST, port, rank, 3, "g", timeout_s=10, secret="known to three ranks")
        return [broadcast(group, 10.0 + rank), broadcast(group, 20.0 + rank)]

    def stranger() -> tuple[str, bool]:
        store = dist.TCPStore(HOST, port, None, False, timedelta(seconds=10))
        # Everything that stopped or joined a group without a secret.
        for key in ("refused", "joined/1", "joined/2"):
            store.add(f"lockstep/g/{key}", 1)
        store.set("lockstep/g/refused", "by a stranger")
        store.set("lockstep/g/world_size", "7")
        store.set(started, "")
        try:
            join_group(HOST, port, 1, 3, "g", timeout_s=2)
        except TransferFailed as error:
            text = str(error)
        keys = store.list_keys()
        values = b"".join(store.get(key) for key in keys if not key.startswith("lockstep-test"))
        return text, b"known to three ranks" in values or any("known" in key for key in keys)

    *group, (refused, reads_secret) = run_ranks(*(lambda i=i: ours(i) for i in range(3)), stranger)
    assert group == [[10.0, 20.0]] * 3
    assert "rank 1 of group 'g'" in refused and not reads_secret


@pytest.mark.parametrize("secrets", [("one", "another"), ("one", None)])
def test_ranks_that_do_not_share_the_secret_do_not_meet(secrets: tuple[str | None, str | None]) -> None:
    port = free_port()
    said = run_ranks(*(lambda i=i: join_group(HOST, port, i, 2, "g", timeout_s=1, secret=secrets[i]) for i in (0, 1)))
    assert all(text.startswith("TransferFailed: rank") for text in said), said
    assert "deadline of 1 s passed" in said[0] and "had not arrived: 1" in said[0]


def test_a_sealed_value_is_read_under_its_own_name_and_secret_only() -> None:
    plain = dist.HashStore()
    store = SealedStore(plain, "secret", "scope")
    store.set("key", "value" * 1000)
    store.set("empty", b"")
    assert store.get("key") == b"value" * 1000 and store.get("empty") == b"" and store.check(["key", "empty"])
    assert store.add("count", 2) == 2 and store.add("count", 1) == 3
    assert not SealedStore(plain, "other", "scope").check(["key"])
    assert not SealedStore(plain, "secret", "other").check(["key"])
    first, second = store._name("key"), store._name("empty")
    assert b"value" not in plain.get(first)
    plain.set(second, plain.get(first))  # a valid value under another name
    with pytest.raises(NotSealed):
        store.get("empty")
    for forged in (b"", b"short", b"x" * 100):
        plain.set(first, forged)
        with pytest.raises(NotSealed, match="does not know the group's secret"):
            store.get("key")
    assert store.delete_key("key") and not store.check(["key"])


def test_the_verb_takes_the_secret_of_our_sender_and_none_of_a_foreign_one() -> None:
    service = RolloutService(Engine(random_model("llama"), EngineConfig(kv_cache="8 blocks")))
    for secret in ("of the group", None):
        host = Rendezvous(HOST, 0, 0, 2, f"group {secret}", timeout_s=20, secret=secret)
        joined: list[WeightGroup] = []
        thread = threading.Thread(target=lambda host=host, joined=joined: joined.append(host.join()))
        thread.start()
        service.init_weights_update_group(
            HOST, host.port, 1, 2, f"group {secret}", "gloo", timeout_s=20, group_secret=secret
        )
        thread.join(20)
        assert joined and service.groups.state()[f"group {secret}"] == "ready"
        joined[0].destroy()
    service.close()


def test_gloo_listens_at_the_groups_address_too() -> None:
    def rank(index: int, port: int) -> set[str]:
        before = _listening_inodes()
        group = join_group(HOST, port, index, 2, "g", timeout_s=10)
        found = {address for inode, address in _listening_inodes().items() if inode not in before}
        broadcast(group, 1.0)
        return found

    port = free_port()
    assert run_ranks(*(lambda i=i: rank(i, port) for i in (0, 1))) == [{"0100007F"}] * 2


def _listening_inodes() -> dict[str, str]:
    """Return, by inode, the addresses at which this process listens."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(link.readlink()))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    rows = [line.split() for path in ("tcp", "tcp6") for line in Path(f"/proc/net/{path}").read_text().splitlines()[1:]]
    return {row[9]: row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def test_the_store_of_ipv6_hosts_listens_at_their_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    rendezvous = Rendezvous("::1", 0, 0, 1, "g", timeout_s=5)
    group = rendezvous.join()
    assert listening_addresses(rendezvous.port) == {"00000000000000000000000001000000"}
    group.destroy()
