"""The workers of a router: their list, their health, and whether they may get requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from ..config import worker_url

logger = logging.getLogger(__name__)


class Health(Enum):
    """The health of a worker by its probes."""

    UNSEEN = "unseen"  # no process has answered at its address yet
    STARTING = "starting"  # a new process answers there, and is not healthy yet
    ALIVE = "alive"
    DRAINING = "draining"  # it finishes its open requests, takes no new ones, and ends
    DEAD = "dead"  # it was healthy, and is not


class Hold(Enum):
    """A reason for which an enabled worker gets no requests."""

    BROADCAST = "broadcast"  # a pause, an update or a group call is in progress
    GROUP = "group"  # it did not join a group: until an operator enables it
    JOURNAL = "journal"  # an update failed: until an operator resolves it
    VERSION = "version"  # it returned with other weights than the rest: until they are the same


@dataclass(eq=False)
class Worker:
    """One engine behind HTTP. The registry, the health checks and the administration change it, on the event loop."""

    url: str
    id: str  # the same for the same URL, also after the router restarts
    disabled: bool = False  # by an operator
    holds: dict[Hold, str] = field(default_factory=dict)  # each with an explanation
    health: Health = Health.UNSEEN
    paused: bool = False  # its engine is paused: requests sent there would wait
    num_running: int = 0  # running sequences that this router sent
    num_routed: int = 0  # sequences that this router has sent so far
    num_failed_probes: int = 0
    num_deaths: int = 0
    last_error: str | None = None
    weight_version: str | None = None  # as last read
    weight_digest: str | None = None  # as last read; None: not read since the version changed, or none is reported
    guarantee: dict[str, object] | None = None  # on which its bits depend; None: not reported
    version_at_return: str | None = None  # the weight version with which its process came, if it was held for that
    num_ranks: int = 1  # ranks of its tensor and pipeline parallel mesh, which join a group
    startup_time: object = None  # differs between two processes at the same address
    died: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when it returns
    drains: asyncio.Event = field(default_factory=asyncio.Event)  # likewise
    is_gone: bool = True  # nothing has listened at its address since it was healthy: the next process is a new one
    is_suspect: bool = False  # a call to it failed: another process may have its address now
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        """Whether its last probe succeeded, or too few have failed since; True also while it drains."""
        return self.health in (Health.ALIVE, Health.DRAINING)

    @property
    def is_draining(self) -> bool:
        """Whether it finishes its open requests and takes no new ones."""
        return self.health is Health.DRAINING

    @property
    def can_take_requests(self) -> bool:
        """Whether it is alive, not draining, enabled and without holds."""
        return self.health is Health.ALIVE and not self.disabled and not self.holds

    @property
    def is_known(self) -> bool:
        """Whether it is alive and its last probe has read all that it reports of its weights and its bits."""
        is_named = self.guarantee is None or self.weight_digest is not None
        return self.is_alive and not self.is_suspect and is_named

    @contextmanager
    def running(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as running inside the block."""
        self.num_running += num_sequences
        self.num_routed += num_sequences
        try:
            yield
        finally:
            self.num_running -= num_sequences

    def suspect(self, why: str) -> None:
        """Note an error, and ask for a probe at once."""
        self.last_error = why
        self.is_suspect = True
        self.check_now.set()

    def forget_weights(self) -> None:
        """Note that its weights are not those that its last probe saw, and ask for a probe at once."""
        self.weight_digest, self.is_suspect = None, True
        self.check_now.set()

    def report(self) -> dict[str, object]:
        """Return its entry of /workers. Changes nothing."""
        return {
            "id": self.id,
            "url": self.url,
            "status": self.health.value,
            "is_healthy": self.health is Health.ALIVE,
            "disabled": self.disabled,
            "held": {hold.value: why for hold, why in self.holds.items()},
            "routable": self.can_take_requests,
            "paused": self.paused,
            "load": self.num_running,
            "num_routed": self.num_routed,
            "num_deaths": self.num_deaths,
            "num_ranks": self.num_ranks,
            "weight_version": self.weight_version,
            "weight_digest": self.weight_digest,
            "last_error": self.last_error,
        }


class UnknownWorker(LookupError):
    """No worker has this id or URL."""


class WorkerRegistry:
    """All workers in the order in which they were added."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.served_version: str | None = None  # on which the workers last agreed; kept while all are dead
        self.on_change: list[Callable[[], None]] = []  # called after each change that may give a request a worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def add(self, url: str, disabled: bool = False) -> tuple[Worker, bool]:
        """Add a worker at this URL, or find it. Returns the worker, and whether it is new. Raises ValueError for a text
        that is no URL of a server."""
        url = worker_url(url)
        worker_id = str(uuid.uuid5(uuid.NAMESPACE_URL, url))
        if worker_id in self._workers:
            return self._workers[worker_id], False
        worker = self._workers[worker_id] = Worker(url, worker_id, disabled)
        self.notify()
        return worker, True

    def find(self, id_or_url: str) -> Worker:
        """Find a worker by its id or URL. Raises UnknownWorker."""
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
        """Remove a worker. It gets no more requests; its running ones finish."""
        del self._workers[worker.id]
        if not self._workers:
            self.served_version = None
        self.notify()

    def live(self) -> list[Worker]:
        """List the workers that are alive."""
        return [worker for worker in self if worker.is_alive]

    def set_disabled(self, worker: Worker, disabled: bool) -> None:
        """Disable or enable a worker for an operator. Enabling also ends the hold after a failed group init, and
        accepts the weight version of a worker that is held for it, if no other live worker serves another version."""
        worker.disabled = disabled
        if not disabled:
            worker.holds.pop(Hold.GROUP, None)
            is_held = worker.is_alive and Hold.VERSION in worker.holds
            if is_held and self._agreed(without=worker) <= {worker.weight_version}:
                self.accept(worker.weight_version, "an operator has enabled a worker that has it")
                worker.holds.pop(Hold.VERSION)
        self.notify()

    def hold(self, worker: Worker, hold: Hold, why: str) -> None:
        """Send no requests to a worker, for this reason."""
        worker.holds[hold] = why
        self.notify()

    def unhold(self, worker: Worker, hold: Hold) -> None:
        """End one hold of a worker, if it has it."""
        if worker.holds.pop(hold, None) is not None:
            self.notify()

    def mark_dead(self, worker: Worker, why: str) -> None:
        """Mark a worker that was healthy as dead, and end all requests that wait for its answers."""
        worker.last_error = why
        if not worker.is_alive:
            return
        if worker.is_draining:
            logger.info("worker %s was draining and has ended: %s", worker.url, why)
        else:
            logger.warning("worker %s is dead: %s", worker.url, why)
        worker.num_deaths += 1
        worker.paused = False  # a new process will not be paused
        worker.died.set()
        self._become(worker, Health.DEAD)

    def mark_gone(self, worker: Worker, why: str) -> None:
        """Note that no process listens at a worker's address. If it was healthy, it is dead now."""
        self.mark_dead(worker, why)
        worker.is_gone = True
        if worker.health is Health.STARTING:
            self._become(worker, Health.DEAD if worker.num_deaths else Health.UNSEEN)

    def mark_starting(self, worker: Worker) -> None:
        """Mark a worker that is not healthy yet as starting, if its process is a new one."""
        if worker.is_gone and worker.health in (Health.UNSEEN, Health.DEAD):
            logger.info("worker %s is starting", worker.url)
            self._become(worker, Health.STARTING)

    def mark_alive(self, worker: Worker) -> None:
        """Mark a worker as alive."""
        if worker.health is not Health.ALIVE:
            logger.info("worker %s is alive", worker.url)
            self._revive(worker, Health.ALIVE)

    def mark_draining(self, worker: Worker) -> None:
        """Mark a worker as draining. It gets no new requests; its open ones go on."""
        if not worker.is_draining:
            logger.info("worker %s is draining: it gets no new requests", worker.url)
            self._revive(worker, Health.DRAINING)
            worker.drains.set()

    def _revive(self, worker: Worker, health: Health) -> None:
        if not worker.is_alive:
            worker.died, worker.drains = asyncio.Event(), asyncio.Event()
        worker.is_gone = False
        self._become(worker, health)

    def _become(self, worker: Worker, health: Health) -> None:
        worker.health = health
        self.notify()

    def check_versions(self, allow_mixed: bool, returned: Worker | None = None) -> None:
        """Hold `returned` back if its weight version differs from all other workers' versions or, without others, from
        the version that the fleet last served. End this hold of the workers whose version is the same again, or that
        were all updated since they returned. Then remember the version on which the workers without this hold agree."""
        for worker in self:
            if worker is not returned and (Hold.VERSION not in worker.holds or not worker.is_alive):
                continue
            if worker is returned:
                worker.version_at_return = worker.weight_version
            why = None if allow_mixed else self._why_other(worker)
            if why is None:
                self.unhold(worker, Hold.VERSION)
                continue
            if worker.holds.get(Hold.VERSION) != why:
                logger.warning("worker %s gets no requests: %s", worker.url, why)
            self.hold(worker, Hold.VERSION, why)
        agreed = self._agreed()
        if returned is not None and Hold.VERSION not in returned.holds and returned.weight_version is not None:
            agreed.add(returned.weight_version)  # it is marked as alive after this
        if len(agreed) == 1 and not any(Hold.BROADCAST in worker.holds for worker in self):
            self.accept(agreed.pop(), "no update through this router brought it")

    def accept(self, version: str | None, warning: str = "") -> None:
        """Remember the weight version that the fleet serves. Logs the warning where it replaces another one."""
        if version is None or version == self.served_version:
            return
        if warning and self.served_version is not None:
            logger.warning(
                "the fleet now serves weight version %r instead of %r: %s", version, self.served_version, warning
            )  # fmt: skip
        self.served_version = version

    def _agreed(self, without: Worker | None = None) -> set[str]:
        """Return the versions of the live workers that are not held for theirs."""
        return {
            worker.weight_version for worker in self.live()
            if worker is not without and Hold.VERSION not in worker.holds and worker.weight_version is not None
        }  # fmt: skip

    def _why_other(self, worker: Worker) -> str | None:
        """Return the reason to hold a worker for its version; None: there is none. Changes nothing."""
        version, rest = worker.weight_version, self._agreed(without=worker)
        if version is None or version in rest:
            return None
        if rest:
            return f"it has weight version {version!r}, the others {', '.join(map(repr, sorted(rest)))}"
        if self.served_version in (None, version):
            return None
        # None serves. Workers that a trainer has updated directly since they returned serve when all have the version.
        if version != worker.version_at_return and {one.weight_version for one in self.live()} == {version}:
            return None
        return (
            f"it has weight version {version!r}, and the fleet last served {self.served_version!r}: update the "
            "weights, or enable the worker to accept its version"
        )

    def notify(self) -> None:
        """Call the functions that wait for a change."""
        for call in self.on_change:
            call()


def needs_operator(registry: WorkerRegistry) -> bool:
    """Return whether no worker can take requests again without an operator. False where there are no workers: some may
    be added."""
    workers = list(registry)
    forbidding = {Hold.GROUP, Hold.JOURNAL}
    return bool(workers) and all(worker.disabled or forbidding & worker.holds.keys() for worker in workers)


def why_none(registry: WorkerRegistry) -> str:
    """Explain why no worker takes requests, worker by worker."""
    said = []
    for worker in registry:
        if worker.health is not Health.ALIVE:
            why = f" ({worker.last_error})" if worker.last_error and not worker.is_draining else ""
            said.append(f"{worker.url} is {worker.health.value}{why}")
        elif worker.disabled:
            said.append(f"{worker.url} is disabled")
        elif worker.holds:
            said.append(f"{worker.url} is held: {'; '.join(worker.holds.values())}")
        else:
            said.append(f"{worker.url} is being asked whether it is well ({worker.last_error})")
    return "; ".join(said) or "there are none"
