"""The workers of a router: who they are, who lives, and who may be given requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from ..config import worker_url

logger = logging.getLogger(__name__)


class Health(Enum):
    """What the probes of a worker say."""

    STARTING = "starting"  # has not answered yet
    ALIVE = "alive"
    DEAD = "dead"


class Hold(Enum):
    """Why a worker gets no requests although nobody disabled it."""

    BROADCAST = "broadcast"  # a pause, an update or a group call is under way
    GROUP = "group"  # it did not join a group: until an operator enables it
    JOURNAL = "journal"  # an update ended badly: until it is resolved
    VERSION = "version"  # it came back with other weights than the rest: until they are the same


@dataclass(eq=False)
class Worker:
    """One engine behind HTTP. Written by the registry, the health checks and the administration, on the event loop."""

    url: str
    id: str  # the same for the same URL, also after the router restarts
    disabled: bool = False  # by an operator
    holds: dict[Hold, str] = field(default_factory=dict)  # and why
    health: Health = Health.STARTING
    paused: bool = False  # its engine: requests sent there would wait
    num_running: int = 0  # sequences it has from us
    num_routed: int = 0  # sequences it ever got from us
    num_failed_probes: int = 0
    num_deaths: int = 0
    last_error: str | None = None
    weight_version: str | None = None  # as last read
    num_ranks: int = 1  # of its tensor and pipeline parallel mesh: members it adds to a group
    startup_time: object = None  # tells one process from the next at the same address
    died: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when it returns
    is_suspect: bool = False  # somebody met trouble: it may be another process by now
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        return self.health is Health.ALIVE

    @property
    def can_take_requests(self) -> bool:
        return self.is_alive and not self.disabled and not self.holds

    @contextmanager
    def running(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as under way."""
        self.num_running += num_sequences
        self.num_routed += num_sequences
        try:
            yield
        finally:
            self.num_running -= num_sequences

    def suspect(self, why: str) -> None:
        """Have it probed at once."""
        self.last_error = why
        self.is_suspect = True
        self.check_now.set()

    def report(self) -> dict[str, object]:
        """As /workers lists it. Changes nothing."""
        return {
            "id": self.id,
            "url": self.url,
            "status": self.health.value,
            "is_healthy": self.is_alive,
            "disabled": self.disabled,
            "held": {hold.value: why for hold, why in self.holds.items()},
            "routable": self.can_take_requests,
            "paused": self.paused,
            "load": self.num_running,
            "num_routed": self.num_routed,
            "num_deaths": self.num_deaths,
            "num_ranks": self.num_ranks,
            "weight_version": self.weight_version,
            "last_error": self.last_error,
        }


class UnknownWorker(LookupError):
    """No worker has this id or URL."""


class WorkerRegistry:
    """All workers in the order in which they were added."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def add(self, url: str, disabled: bool = False) -> tuple[Worker, bool]:
        """The worker at this URL, and whether it is new. Raises ValueError for what is no URL of a server."""
        url = worker_url(url)
        worker_id = str(uuid.uuid5(uuid.NAMESPACE_URL, url))
        if worker_id in self._workers:
            return self._workers[worker_id], False
        worker = self._workers[worker_id] = Worker(url, worker_id, disabled)
        self.notify()
        return worker, True

    def find(self, id_or_url: str) -> Worker:
        """Raises UnknownWorker."""
        if worker := self._workers.get(id_or_url):
            return worker
        try:
            url = worker_url(id_or_url)
        except ValueError:
            url = ""
        for worker in self._workers.values():
            if worker.url == url:
                return worker
        raise UnknownWorker(f"no worker {id_or_url!r}; known: {', '.join(w.url for w in self) or 'none'}")

    def remove(self, worker: Worker) -> None:
        """It gets nothing more; what it is doing it finishes."""
        del self._workers[worker.id]
        self.notify()

    def live(self) -> list[Worker]:
        return [worker for worker in self if worker.is_alive]

    def set_disabled(self, worker: Worker, disabled: bool) -> None:
        """By an operator. Enabling also ends the hold after a failed group init."""
        worker.disabled = disabled
        if not disabled:
            worker.holds.pop(Hold.GROUP, None)
        self.notify()

    def hold(self, worker: Worker, hold: Hold, why: str) -> None:
        worker.holds[hold] = why
        self.notify()

    def unhold(self, worker: Worker, hold: Hold) -> None:
        if worker.holds.pop(hold, None) is not None:
            self.notify()

    def mark_dead(self, worker: Worker, why: str) -> None:
        """Everything that waits for an answer of it ends."""
        worker.last_error = why
        if worker.health is Health.DEAD:
            return
        logger.warning("worker %s is dead: %s", worker.url, why)
        worker.num_deaths += worker.is_alive
        worker.health = Health.DEAD
        worker.paused = False  # a new process is not
        worker.died.set()
        self.notify()

    def mark_alive(self, worker: Worker) -> None:
        if not worker.is_alive:
            logger.info("worker %s is alive", worker.url)
            worker.health = Health.ALIVE
            worker.died = asyncio.Event()
            self.notify()

    def check_versions(self, allow_mixed: bool, returned: Worker | None = None) -> None:
        """Hold `returned` back where its weights are other than those of all the rest, and let go whoever's are the
        same again, or have nobody left to differ from."""
        for worker in self:
            if worker is not returned and Hold.VERSION not in worker.holds:
                continue
            rest = {
                other.weight_version
                for other in self.live()
                if other is not worker and Hold.VERSION not in other.holds and other.weight_version is not None
            }
            differs = bool(rest) and worker.weight_version is not None and worker.weight_version not in rest
            if differs and not allow_mixed:
                others = ", ".join(map(repr, sorted(rest)))
                why = f"it has weight version {worker.weight_version!r}, the others {others}"
                if worker.holds.get(Hold.VERSION) != why:
                    logger.warning("worker %s gets no requests: %s", worker.url, why)
                self.hold(worker, Hold.VERSION, why)
            else:
                self.unhold(worker, Hold.VERSION)

    def notify(self) -> None:
        """Something changed that others may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, deadline: float) -> bool:
        """Until something changes; False at `deadline` (time.monotonic)."""
        changed = self._changed
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await changed.wait()
        except TimeoutError:
            return False
        return True


def why_none(registry: WorkerRegistry) -> str:
    """Why nobody takes requests, worker by worker."""
    said = []
    for worker in registry:
        if not worker.is_alive:
            said.append(f"{worker.url} is {worker.health.value} ({worker.last_error or 'not answered yet'})")
        elif worker.disabled:
            said.append(f"{worker.url} is disabled")
        else:
            said.append(f"{worker.url} is held: {'; '.join(worker.holds.values())}")
    return "; ".join(said) or "there are none"
