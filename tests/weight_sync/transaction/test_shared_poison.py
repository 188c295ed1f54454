"""Ranks that hold one model together where one of them cannot restore its bytes: the model is poisoned on all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.tests.weight_sync.transaction.replica_of_threads import NUM_RANKS, Rank, Replica, digests, succeed, whole
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, TransferFailed, WeightSyncError
from lockstep.weight_sync.transaction.peers import PeerFailed
from lockstep.weight_sync.transaction.undo import UndoLog

BROKEN = 2  # the rank whose undo fails


@pytest.fixture
def replica() -> Replica:
    return Replica()


def break_undo(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the undo of the session that is open fail on one rank."""

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    log = replica.ranks[BROKEN].transaction._log
    assert isinstance(log, UndoLog)
    monkeypatch.setattr(log, "restore_all", broken)
    monkeypatch.setattr(log, "restore", broken)


def assert_poisoned_everywhere(replica: Replica) -> None:
    for rank in replica.ranks:
        state = rank.manager.state()
        assert state["state"] == "poisoned" and rank.is_poisoned
        assert rank.rank == BROKEN or f"rank {BROKEN}: the weights are partly written" in str(state["why"])
    assert all(isinstance(e, Poisoned) for e in replica.on_all(lambda rank: rank.update(whole(1.0))))
    unverified = replica.on_all(heal_with({}))
    assert all(isinstance(error, Poisoned) for error in unverified)
    replica.on_all(lambda rank: rank.manager.rollback())
    assert replica.states == {"poisoned"}
    succeed(replica.on_all(heal_with(digests(whole(2.0)))))
    assert replica.values == [2.0] * NUM_RANKS and replica.states == {"committed"}
    succeed(replica.on_all(lambda rank: rank.update(whole(3.0))))


def heal_with(proof: dict[str, str]) -> Callable[[Rank], object]:
    def heal(rank: Rank) -> object:
        rank.manager.begin("9")
        rank.update(whole(2.0), verify=proof)
        return rank.manager.commit()

    return heal


def others() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in whole(1.0).items() if name != "rows"}


def fail_an_update(rank: Rank) -> object:
    rank.fail[f"norm{rank.rank} 0"] = TransferFailed("the wire broke")
    return rank.update(others())


def fail_a_commit(rank: Rank) -> object:
    rank.update(others())
    rank.fail["publish"] = TransferFailed("no") if rank.rank == 0 else None
    return rank.manager.commit()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(fail_an_update, id="update"),
        pytest.param(fail_a_commit, id="commit"),
        pytest.param(lambda rank: rank.manager.rollback(), id="rollback"),
    ],
)
def test_an_undo_that_fails_on_one_rank_poisons_the_model_on_all(replica, monkeypatch, end):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    succeed(replica.on_all(lambda rank: rank.update({"rows": whole(1.0)["rows"]})))
    break_undo(replica, monkeypatch)
    results = replica.on_all(end)
    assert all(isinstance(error, (RuntimeError, WeightSyncError)) for error in results), results
    assert str(results[BROKEN]) == "the device is gone"
    assert_poisoned_everywhere(replica)


def test_a_revert_that_fails_on_one_rank_poisons_the_model_on_all(replica, monkeypatch):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    succeed(replica.on_all(lambda rank: rank.update(whole(1.0))))
    succeed(replica.on_all(lambda rank: rank.manager.commit()))
    break_undo(replica, monkeypatch)
    results = replica.on_all(lambda rank: rank.manager.revert())
    for rank, error in enumerate(results):
        assert isinstance(error, RuntimeError if rank == BROKEN else PeerFailed) and "the device is gone" in str(error)
    assert_poisoned_everywhere(replica)


@pytest.mark.parametrize("where", ["update", "verify"])
def test_a_repair_that_fails_on_one_rank_ends_the_session_on_all(replica, monkeypatch, where):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    new = whole(1.0)
    break_undo(replica, monkeypatch)
    if where == "update":
        results = replica.on_all(lambda rank: rank.update(new, corrupt=rank.rank == 1, verify=digests(new)))
    else:
        succeed(replica.on_all(lambda rank: rank.update(new, corrupt=rank.rank == 1)))
        results = replica.on_all(lambda rank: rank.manager.verify(digests(new)))
    assert not [error for error in results if isinstance(error, DigestMismatch)], results
    assert_poisoned_everywhere(replica)


def test_without_undo_a_rank_that_wrote_nothing_yet_is_poisoned_with_the_others(replica):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7", undo="none")))
    for rank in replica.ranks:
        if rank.rank != BROKEN:
            rank.fail["rows 0"] = TransferFailed("the wire broke")  # its first bytes
    replica.on_all(lambda rank: rank.update(whole(1.0)))
    assert [rank.value if rank.rank != BROKEN else None for rank in replica.ranks] == [0.0, 0.0, None, 0.0]
    assert_poisoned_everywhere(replica)
