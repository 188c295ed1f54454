"""Weight sessions of ranks that hold one model together: an update takes effect on all of them or on none."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from lockstep.tests.weight_sync.transaction.replica_of_threads import (
    NUM_RANKS,
    PATIENCE,
    Rank,
    RankLost,
    Replica,
    digests,
    succeed,
    whole,
)
from lockstep.weight_sync.delta.apply import apply_delta
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, SessionError, TransferFailed, WeightSyncError
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.peers import PeerFailed


@pytest.fixture
def replica() -> Replica:
    return Replica()


def test_a_session_lands_on_all_ranks_and_is_verified_by_the_merged_digests(replica):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    succeed(replica.on_all(lambda rank: rank.update(whole(1.0))))
    succeed(replica.on_all(lambda rank: rank.manager.verify(digests(whole(1.0)))))
    records = replica.on_all(lambda rank: rank.manager.commit())
    said = [(r.version, r.coverage, r.verified, r.num_tensors) for r in records]
    assert said == [("7", "full", True, 2 + NUM_RANKS)] * NUM_RANKS
    assert replica.values == [1.0] * NUM_RANKS
    succeed(replica.on_all(lambda rank: rank.manager.revert()))
    assert replica.values == [0.0] * NUM_RANKS


@pytest.mark.parametrize("culprit", range(NUM_RANKS))
@pytest.mark.parametrize("where", ["rows 0", "columns 640", "norm2 0"])
def test_what_fails_on_one_rank_while_bytes_arrive_is_undone_on_all(replica, culprit, where):
    replica.ranks[culprit].fail[where] = TransferFailed("the wire broke")
    results = replica.on_all(lambda rank: rank.update(whole(1.0)))
    for rank, error in enumerate(results):
        kind = TransferFailed if rank == culprit else PeerFailed
        assert isinstance(error, kind) and "the wire broke" in str(error)
        if rank != culprit:
            assert f"rank {culprit}: TransferFailed" in str(error)
    assert replica.values == [0.0] * NUM_RANKS and replica.states == {"rolled_back"}
    succeed(replica.on_all(lambda rank: rank.update(whole(2.0))))
    succeed(replica.on_all(lambda rank: rank.manager.commit_implicit()))
    assert replica.values == [2.0] * NUM_RANKS


@pytest.mark.parametrize("explicit", [True, False])
def test_a_byte_that_is_wrong_on_one_rank_is_found_by_all(replica, explicit):
    if explicit:
        succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    new = whole(1.0)
    results = replica.on_all(lambda rank: rank.update(new, corrupt=rank.rank == 1, verify=digests(new)))
    assert all(isinstance(error, DigestMismatch) and error.names == ("columns",) for error in results)
    if explicit:  # and is repaired by sending that tensor again
        columns = {"columns": new["columns"]}
        succeed(replica.on_all(lambda rank: rank.update(columns, verify=digests(columns))))
        succeed(replica.on_all(lambda rank: rank.manager.commit()))
    assert replica.values == [1.0 if explicit else 0.0] * NUM_RANKS


@pytest.mark.parametrize("where", ["prepare", "publish"])
@pytest.mark.parametrize("undo", ["tensors", "none"])
def test_a_commit_that_fails_on_one_rank_happens_on_none(replica, where, undo):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7", undo=undo)))
    succeed(replica.on_all(lambda rank: rank.update(whole(1.0))))
    replica.ranks[2].fail[where] = TransferFailed("no")
    results = replica.on_all(lambda rank: rank.manager.commit())
    assert [type(error) for error in results] == [PeerFailed, PeerFailed, TransferFailed, PeerFailed]
    assert [rank.num_taken_back for rank in replica.ranks] == ([1, 1, 0, 1] if where == "publish" else [0] * NUM_RANKS)
    if undo == "tensors":
        assert replica.values == [0.0] * NUM_RANKS and replica.states == {"rolled_back"}
    else:
        assert replica.states == {"poisoned"}
        assert all(isinstance(e, Poisoned) for e in replica.on_all(lambda rank: rank.update(whole(1.0))))


def test_what_one_rank_must_refuse_is_refused_on_all_before_a_byte_moves(replica):
    def busy() -> None:
        raise ValueError("requests are running")

    def update(rank: Rank) -> object:
        return rank.update(whole(1.0), prepare=busy if rank.rank == 0 else lambda: None)

    results = replica.on_all(update)
    assert [type(error) for error in results] == [ValueError, PeerFailed, PeerFailed, PeerFailed]
    assert replica.values == [0.0] * NUM_RANKS and replica.states == {"idle"}


@pytest.mark.parametrize("where", ["rows 640", "digest", "prepare"])
def test_survivors_of_a_rank_that_dies_have_the_old_weights(replica, where):
    class Killed(BaseException):
        """An exception that no handler of the session catches, as when a process is killed."""

    def run(rank: Rank) -> object:
        try:
            rank.manager.begin("7")
            rank.update(whole(1.0), verify=digests(whole(1.0)))
            return rank.manager.commit()
        except (WeightSyncError, ValueError) as error:
            return error
        except Killed:
            replica.wires.barrier.abort()
            return None

    replica.ranks[1].fail[where] = Killed()  # type: ignore[assignment]
    results = replica.on_all(run)
    for rank in (0, 2, 3):
        assert isinstance(results[rank], RankLost)
        assert replica.ranks[rank].value == 0.0 and not replica.ranks[rank].published
        assert replica.ranks[rank].manager.state()["state"] == "rolled_back"


def test_a_delta_over_cut_tensors_counts_only_once_its_result_is_verified(replica):
    old, new = whole(0.0), whole(0.0)
    for tensor in new.values():
        tensor.view(-1)[::10] = 1.0
    chunks = list(encode_delta(old, new.items()))

    def apply(rank: Rank, **options: object) -> object:
        def receive(sink: Sink) -> Sequence[TensorSpec]:
            apply_delta(specs_of(new.items()), chunks, sink)
            return specs_of(new.items())

        return rank.manager.update("delta", receive, **options)

    results = replica.on_all(apply)
    assert all(isinstance(error, TransferFailed) and "columns, rows" in str(error) for error in results)
    assert replica.values == [0.0] * NUM_RANKS
    succeed(replica.on_all(lambda rank: apply(rank, verify=digests(new))))
    succeed(replica.on_all(lambda rank: rank.manager.commit_implicit()))
    # Applied a second time it would undo itself. A chunk cannot notice this, the digests can.
    succeed(replica.on_all(lambda rank: rank.manager.begin("8")))
    succeed(replica.on_all(apply))
    results = replica.on_all(lambda rank: rank.manager.commit())
    assert all(isinstance(error, ValueError) and "verify_weight_update" in str(error) for error in results)
    results = replica.on_all(lambda rank: rank.manager.verify(digests(new)))
    assert all(isinstance(error, DigestMismatch) and set(error.names) == {"rows", "columns"} for error in results)
    replica.on_all(lambda rank: rank.manager.rollback())
    roots = replica.on_all(lambda rank: rank.digest_roots(list(new)))
    assert roots[0] == tensor_roots(new.items())


def test_a_session_whose_time_is_over_on_one_rank_is_over_on_all(replica):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7", lease_s=PATIENCE if rank.rank else 0.01)))
    end = threading.Event()
    end.wait(0.05)
    results = replica.on_all(lambda rank: rank.update(whole(1.0)))
    assert all(isinstance(error, SessionError) and "expired" in str(error) for error in results)
    assert replica.values == [0.0] * NUM_RANKS and replica.states == {"rolled_back"}


def test_ranks_at_different_calls_find_out(replica):
    succeed(replica.on_all(lambda rank: rank.manager.begin("7")))
    succeed(replica.on_all(lambda rank: rank.update(whole(1.0))))
    results = replica.on_all(lambda rank: rank.update(whole(1.0)) if rank.rank == 1 else rank.manager.commit())
    assert [type(error) for error in results] == [PeerFailed] * NUM_RANKS
    assert "rank 1: it is at update, rank 0 at commit" in str(results[0])
    replica.on_all(lambda rank: rank.manager.rollback())
    assert replica.values == [0.0] * NUM_RANKS


def test_the_end_of_a_lease_for_which_the_other_ranks_did_not_come_is_tried_again(replica):
    tried, threads = threading.Semaphore(0), []

    def on_lease_over() -> None:
        threads.append(threading.current_thread())
        tried.release()

    replica.ranks[0].on_lease_over = on_lease_over
    succeed(replica.on_all(lambda rank: rank.manager.begin("7", lease_s=PATIENCE if rank.rank else 0.01)))
    assert tried.acquire(timeout=PATIENCE) and tried.acquire(timeout=PATIENCE)
    assert replica.states == {"open"}
    succeed(replica.on_all(lambda rank: rank.manager.rollback(only_expired=True)))
    assert replica.states == {"rolled_back"}
    threads[0].join(PATIENCE)  # it ends with the session
    assert not threads[0].is_alive() and len(set(threads)) == 1
