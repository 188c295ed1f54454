"""Four ranks in threads that hold one model together, each with a session manager over its part of the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from lockstep.rollout.sharding.shards import Shard
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.digests.shard_digest import local_digests, merged_roots
from lockstep.weight_sync.errors import WeightSyncError
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.host import SessionHost
from lockstep.weight_sync.transaction.peers import Peers
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
        self.is_poisoned = False  # after the last rollback
        self.fail: dict[str, Exception | None] = {}
        peers = Peers(rank, NUM_RANKS, lambda value: wires.exchange(rank, value))
        self.manager = SessionManager(self, peers=peers)

    def _maybe(self, what: str) -> None:
        if (error := self.fail.pop(what, None)) is not None:
            raise error

    def make_transaction(self, coverage: str, undo: str) -> WeightTransaction:
        elsewhere = [spec for spec in self.specs if spec.name not in self.tensors]
        self.transaction = WeightTransaction(
            self.tensors.items(), coverage=coverage, undo=undo, shards=self.shards, elsewhere=elsewhere
        )
        return self.transaction

    def on_rollback(self, why: str, is_poisoned: bool) -> None:
        self.is_poisoned = is_poisoned

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
            except (WeightSyncError, ValueError, RuntimeError) as error:
                return error

        with ThreadPoolExecutor(NUM_RANKS) as pool:
            return list(pool.map(run, self.ranks))

    @property
    def values(self) -> list[float]:
        return [rank.value for rank in self.ranks]

    @property
    def states(self) -> set[object]:
        return {rank.manager.state()["state"] for rank in self.ranks}


def succeed(results: Sequence[object]) -> None:
    assert not [result for result in results if isinstance(result, Exception)], results
