"""Weight sessions of ranks that hold one model together: an update takes effect on all of them or on none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.rollout.sharding.shards import Shard
from lockstep.weight_sync.delta.apply import apply_delta
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.digests.shard_digest import local_digests, merged_roots
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, SessionError, TransferFailed, WeightSyncError
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.host import SessionHost
from lockstep.weight_sync.transaction.peers import PeerFailed, Peers
from lockstep.weight_sync.transaction.records import SessionRecord
from lockstep.weight_sync.transaction.session import SessionManager
from lockstep.weight_sync.transaction.transaction import WeightTransaction

PATIENCE = 30.0
NUM_RANKS = 4
SIZE = 48 * NUM_RANKS

Tensors = dict[str, torch.Tensor]


class RankLost(WeightSyncError):
    """The error of a rank that does not answer."""


class Wires:
    """The ranks' collective: every rank gives a value and gets all values. A missing rank breaks it for good."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_RANKS, timeout=PATIENCE)
        self.said: dict[int, object] = {}

    def exchange(self, rank: int, value: object) -> list[object]:
        self.said[rank] = value
        try:
            self.barrier.wait()
            values = [self.said[r] for r in range(NUM_RANKS)]
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("a rank died") from error
        return values


class Rank(SessionHost):
    """One rank: its quarter of a row-cut and of a column-cut tensor, a norm of its own stage, and a session manager."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self.wires = rank, wires
        part = (rank * 48, rank * 48 + 48)
        self.shards = {"rows": Shard((SIZE, 32), 0, (part,)), "columns": Shard((16, SIZE), 1, (part,))}
        self.specs = specs_of(whole(0.0).items())
        self.tensors = {n: torch.zeros(self.shards[n].shape) for n in self.shards} | {f"norm{rank}": torch.zeros(24)}
        self.published: list[SessionRecord] = []
        self.num_taken_back = 0
        self.fail: dict[str, Exception | None] = {}
        peers = Peers(rank, NUM_RANKS, lambda value: wires.exchange(rank, value))
        self.manager = SessionManager(self, peers=peers)

    def _maybe(self, what: str) -> None:
        if (error := self.fail.pop(what, None)) is not None:
            raise error

    def make_transaction(self, coverage: str, undo: str) -> WeightTransaction:
        elsewhere = [spec for spec in self.specs if spec.name not in self.tensors]
        return WeightTransaction(
            self.tensors.items(), coverage=coverage, undo=undo, shards=self.shards, elsewhere=elsewhere
        )

    def prepare_commit(self, record: SessionRecord) -> None:
        self._maybe("prepare")

    def publish(self, record: SessionRecord) -> None:
        self._maybe("publish")
        self.published.append(record)

    def unpublish(self) -> None:
        self.num_taken_back += 1

    def digest_roots(self, names: Sequence[str]) -> dict[str, bytes]:
        self._maybe("digest")
        own = {name: self.tensors[name] for name in names if name in self.tensors}
        contributions = self.wires.exchange(self.rank, local_digests(own, self.shards))
        return merged_roots([spec for spec in self.specs if spec.name in names], contributions)

    @property
    def value(self) -> float:
        values = {value for tensor in self.tensors.values() for value in tensor.flatten().tolist()}
        assert len(values) == 1, f"torn: {values}"
        return values.pop()

    def update(self, tensors: Tensors, corrupt: bool = False, **options: object) -> object:
        return self.manager.update("test", lambda sink: self.receive(tensors, sink, corrupt), **options)

    def receive(self, tensors: Tensors, sink: Sink, corrupt: bool = False) -> Sequence[TensorSpec]:
        specs = specs_of(tensors.items())
        sink.expect(specs)
        for name, tensor in tensors.items():
            data = byte_view(tensor)
            for start in range(0, data.numel(), 640):
                self._maybe(f"{name} {start}")
                sink.write(name, start, data[start : start + 640])
        if corrupt:
            self.tensors["columns"][0, 0] += 1
        return specs


def whole(value: float) -> Tensors:
    shapes = {"rows": (SIZE, 32), "columns": (16, SIZE), **{f"norm{rank}": (24,) for rank in range(NUM_RANKS)}}
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


def digests(tensors: Tensors) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(tensors.items()).items()}


class Replica:
    def __init__(self) -> None:
        self.wires = Wires()
        self.ranks = [Rank(rank, self.wires) for rank in range(NUM_RANKS)]

    def on_all(self, call: Callable[[Rank], object]) -> list[object]:
        """Return the call's result or exception on each rank."""

        def run(rank: Rank) -> object:
            try:
                return call(rank)
            except (WeightSyncError, ValueError) as error:
                return error

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            return list(pool.map(run, self.ranks))

    @property
    def values(self) -> list[float]:
        return [rank.value for rank in self.ranks]

    @property
    def states(self) -> set[object]:
        return {rank.manager.state()["state"] for rank in self.ranks}


@pytest.fixture
def replica() -> Replica:
    return Replica()


def succeed(results: Sequence[object]) -> None:
    assert not [result for result in results if isinstance(result, Exception)], results


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
