"""Signs of life of a replica's ranks, exchanged through a store, and the search for a rank that failed.

A thread of each rank writes its rank's phase and reads the phases of the others. The first rank that finds a failed
rank posts the cause under one key, which is written once, so that all remaining ranks name the same rank. If the
store's host has stopped, the store's operations never return: only the thread calls them, and other threads check the
time of their last return.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...kernels.machine.running_time import running_time
from ..errors import RankFailure
from .mesh import Mesh

AWAY = "away"  # between two calls, when the trainer has the rank
IDLE = "between steps"
# In these phases a rank waits for another rank; in any other phase it works, and may be stuck.
WAITING = frozenset({AWAY, IDLE, "waiting for a step", "waiting for results", "waiting for hidden states",
                     "waiting for ranks", "gave up"})  # fmt: skip
_MESSAGE_BYTES = 512
_LONGEST = timedelta(days=1)  # of an operation of the store
_SILENT = "gives no sign of life: stopped, or its process is blocked"


@dataclass(frozen=True)
class Cause:
    """The failed ranks and the reason, as posted in the store."""

    ranks: tuple[int, ...]  # of the world
    why: str
    phase: str
    step: int
    seconds: float

    def error(self) -> RankFailure:
        return RankFailure(self.why, self.ranks, self.phase, self.step, self.seconds)


@dataclass
class _Pulse:
    """The last sign of life of another rank."""

    text: bytes = b""  # as it was read
    phase: str = AWAY
    step: int = -1
    heard: float = 0.0  # when the text last changed, by our clock
    moved: float = 0.0  # when the phase or step last changed


@dataclass(frozen=True)
class StoreAddress:
    """The address of the store of a replica's ranks, with a prefix of the engine's own."""

    host: str
    port: int
    prefix: str
    owner: int  # local rank whose process hosts it; -1: the launcher hosts it


def meet(mesh: Mesh) -> tuple[dist.Store, StoreAddress]:
    """Connect to a store that every rank of the replica reaches. A collective of the replica.

    The launcher's store, which survives the ranks, or else one that the controller hosts.
    """
    assert mesh.replica_group is not None
    timeout = timedelta(seconds=mesh.timeout_s)
    server = None
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    is_one_host = _is_one_host(mesh)
    if mesh.is_controller:
        prefix = f"lockstep/{uuid.uuid4().hex}"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = StoreAddress(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix, -1)
        else:
            host = "127.0.0.1" if is_one_host else socket.gethostname()
            listener = socket.create_server((host, 0))
            port = listener.getsockname()[1]
            # Of this address only; torch by itself would listen at all of the machine.
            server = dist.TCPStore(
                host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            address = StoreAddress(host, port, prefix, 0)
        data = json.dumps(asdict(address)).encode()
        message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mesh.replica_group.broadcast(message, 0).wait()
    address = StoreAddress(**json.loads(bytes(message.tolist()).rstrip(b"\0")))
    store = server
    if store is None:
        store = dist.TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)
    store.set_timeout(_LONGEST)  # others look whether it answers, by the time in which this process runs
    return dist.PrefixStore(address.prefix, store), address


def _is_one_host(mesh: Mesh) -> bool:
    """Return whether all ranks of the replica have the same host name. A collective of the replica."""
    name = hashlib.sha256(socket.gethostname().encode()).digest()
    mine = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    all_names = [torch.zeros_like(mine) for _ in range(mesh.num_ranks)]
    dist.all_gather(all_names, mine, group=mesh.replica_group)
    return all(torch.equal(mine, other) for other in all_names)


class RankWatch:
    """The watch of one rank: it reports this rank's phase, reads the other ranks' phases, and finds the failed rank."""

    def __init__(self, mesh: Mesh, timeout_s: float, on_failure: Callable[[Cause], None]) -> None:
        assert mesh.replica_group is not None
        self.timeout_s = timeout_s
        self.failure: Cause | None = None
        self.is_over = False  # the replica ends in order: a rank that is gone is no failure
        self._on_failure = on_failure
        self._mesh = mesh
        self._ranks = mesh.plan.replica(mesh.rank)  # world ranks by local rank
        self._others = [rank for rank in range(mesh.num_ranks) if rank != mesh.local_rank]
        self._interval_s = min(max(timeout_s / 20, 0.05), 2.0)
        self._phase: tuple[str, int] = (AWAY, -1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._proposal: Cause | None = None
        self._is_closed = False
        self._pulses = {rank: _Pulse() for rank in self._others}
        self._store, self.address = meet(mesh)
        self._beat(0)
        if mesh.is_controller:
            self._store.set("failure", "")
        mesh.replica_group.barrier().wait()  # every key exists now: no read waits
        now = running_time()
        self._last_round = now  # when the store last answered
        for pulse in self._pulses.values():
            pulse.heard = pulse.moved = now
        self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
        self._thread.start()

    # -- this rank's phase ------------------------------------------------------------------------------------------

    @property
    def is_away(self) -> bool:
        """Whether this rank is between two calls."""
        return self._phase[0] == AWAY

    def enter(self, phase: str, step: int | None = None) -> None:
        """Set this rank's phase. Costs nothing: the thread reports it to the others."""
        self._phase = (phase, self._phase[1] if step is None else step)

    @contextmanager
    def phase(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Set this rank's phase for the time of the context."""
        before = self._phase
        self.enter(phase, step)
        try:
            yield
        finally:
            self._phase = (before[0], self._phase[1])

    def describe(self, rank: int) -> str:
        """Describe the place of a local rank. Example: "rank 3 (stage 1, tp 0)"."""
        coords = self._mesh.plan.coords(self._ranks[rank])
        return f"rank {self._ranks[rank]} (stage {coords.pp}, tp {coords.tp})"

    def cause(self, ranks: list[int], what: str) -> Cause:
        """Make a cause that names these local ranks. what: the predicate of its sentence."""
        now, mine = running_time(), self._mesh.local_rank
        pulses = {rank: self._pulses[rank] for rank in ranks if rank != mine}
        first = pulses.get(ranks[0]) or _Pulse(phase=self._phase[0], step=self._phase[1], heard=now)
        seconds = max((now - pulse.heard for pulse in pulses.values()), default=0.0)
        where = f"in phase {first.phase!r}, step {first.step}, last heard {seconds:.1f} s ago"
        names = " and ".join(self.describe(rank) for rank in ranks)
        return Cause(tuple(self._ranks[rank] for rank in ranks), f"{names} {what} ({where})", first.phase, first.step,
                     round(seconds, 3))  # fmt: skip

    # -- blame ------------------------------------------------------------------------------------------------------

    def post(self, cause: Cause) -> Cause:
        """Post this cause unless one was posted before; returns the posted one, the same for all ranks."""
        with self._lock:
            if self.failure is None:
                self._proposal = self._proposal or cause
                self._wake.set()
                self._changed.wait_for(lambda: self.failure is not None, self.timeout_s)
        return self.settle(cause)

    def accept(self, text: bytes) -> None:
        """Take over the posted cause from the controller's message."""
        self.settle(_parse(text))

    def silent_store(self) -> Cause | None:
        """Return a cause that names the store's host if the store has not answered for the timeout, else None."""
        silent_s = running_time() - self._last_round
        return self._blame_host(f"does not answer for {silent_s:.1f} s") if silent_s > self.timeout_s else None

    def explain(self, suspects: list[int], what: str) -> Cause:
        """Find and post the cause of a wait in vain. If no rank is silent or stuck, it is `suspects` with `what`.

        suspects: local ranks; what: the predicate of the sentence.
        """
        return self.find_culprit() or self.post(self.cause(suspects, what))

    def find_culprit(self) -> Cause | None:
        """Find the silent ranks, or else the rank that is stuck at work, and post the cause. None if there is none.

        Waits a little, so that other waiting ranks give up first.
        """
        self.enter("gave up")
        grace_s = min(max(self.timeout_s / 4, 1.0), 10.0)
        began = running_time()
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: self.failure is not None, grace_s):
                    return self.failure
            if (cause := self.silent_store()) is not None:
                return self.settle(cause)
            patience_s = 4 * self._interval_s + 1.0
            silent = self._not_since("heard", patience_s)
            if silent:
                return self.post(self.cause(silent, _SILENT))
            stuck = [rank for rank in self._not_since("moved", patience_s) if self._pulses[rank].phase not in WAITING]
            # Of several stuck ranks one hangs; the others wait for it inside their work and give up after a while.
            if len(stuck) <= 1 or running_time() - began > self.timeout_s:
                return self.post(self.cause(stuck, "hangs")) if stuck else None

    def _not_since(self, what: str, seconds: float) -> list[int]:
        """Return the ranks whose time `what` ("heard" or "moved") is older than `seconds`."""
        now = running_time()
        return [rank for rank in self._others if now - getattr(self._pulses[rank], what) > seconds]

    def close(self) -> None:
        """End the signs of life. No cause is posted from here on."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(self.timeout_s)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        num_beats = 0
        try:
            while not self._is_closed:
                self._wake.wait(self._interval_s)
                self._wake.clear()
                num_beats += 1
                self._beat(num_beats)
                self._read()
                self._last_round = running_time()
                self._judge()
        except RuntimeError as error:  # the store's host has ended, unless an earlier cause arrives
            with self._lock:
                self._changed.wait_for(lambda: self.failure is not None or self._is_closed, min(self.timeout_s / 4, 2))
            if not (self._is_closed or self.is_over):
                self.settle(self._blame_host(f"has ended: the store it hosts is gone ({error})"))

    def _beat(self, num_beats: int) -> None:
        phase, step = self._phase
        self._store.set(f"pulse{self._mesh.local_rank}", json.dumps([num_beats, phase, step]))

    def _read(self) -> None:
        texts = self._store.multi_get([f"pulse{rank}" for rank in self._others] + ["failure"])
        now = running_time()
        for rank, text in zip(self._others, texts, strict=False):
            pulse = self._pulses[rank]
            if text != pulse.text:
                _, phase, step = json.loads(text)
                if (phase, step) != (pulse.phase, pulse.step):
                    pulse.moved = now
                pulse.text, pulse.phase, pulse.step, pulse.heard = text, phase, step, now
        if texts[-1]:
            self.settle(_parse(texts[-1]))

    def _judge(self) -> None:
        if self.is_over:
            return
        if self.failure is None and self._proposal is None:
            silent = self._not_since("heard", self.timeout_s)
            if self.is_away:  # between two calls no rank waits for another that is away too
                silent = [rank for rank in silent if self._pulses[rank].phase != AWAY]
            if silent:
                self._proposal = self.cause(silent, _SILENT)
        if self.failure is None and self._proposal is not None:
            text = json.dumps(asdict(self._proposal))
            self.settle(_parse(self._store.compare_set("failure", "", text)))

    def _blame_host(self, what: str) -> Cause:
        owner = self.address.owner
        if owner >= 0 and owner != self._mesh.local_rank:
            return self.cause([owner], what)
        return Cause((), f"the store at {self.address.host}:{self.address.port} {what}", *self._phase, 0.0)

    def settle(self, cause: Cause) -> Cause:
        """Make this the cause of the failure on this rank unless there is one; returns the valid one."""
        with self._lock:
            is_news = self.failure is None
            self.failure = self.failure or cause
            self._changed.notify_all()
        if is_news:
            self._on_failure(self.failure)
        return self.failure


def _parse(text: bytes) -> Cause:
    fields = json.loads(text)
    return Cause(**{**fields, "ranks": tuple(fields["ranks"])})
