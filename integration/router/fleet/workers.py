"""The workers of a router: their list, their health, and whether they may get requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence

from ..config import worker_url
from .served import Served, Weights
from .worker import Health, Hold, Worker

logger = logging.getLogger(__name__)


class UnknownWorker(LookupError):
    """No worker has this id or URL."""


class WorkerRegistry:
    """All workers in the order in which they were added."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.served = Served()  # on which the workers last agreed; kept while all are dead
        self.on_served: Callable[[Served], None] = lambda served: None  # called with it by each check
        self.on_change: list[Callable[[], None]] = []  # called after each change that may give a request a worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    @property
    def served_version(self) -> str | None:
        """The weight version on which the workers last agreed."""
        return None if self.served.weights is None else self.served.weights.version

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
            self._serve(Served())
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
            its, rest = worker.weights, self._agreed(without=worker)
            is_held = worker.is_alive and Hold.VERSION in worker.holds
            if is_held and its is not None and not any(its.are_other(one) for one in rest):
                worker.holds.pop(Hold.VERSION)
                self.accept([worker], "an operator has enabled a worker that has it")
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
        """Hold `returned` back if its weights, by version and digest, are others than all other workers' or, without
        others, than those that the fleet last served. End this hold of the workers whose weights are the same again,
        or that were all updated since they returned. Then remember the weights on which the workers without this hold
        agree."""
        for worker in self:
            if worker is not returned and (Hold.VERSION not in worker.holds or not worker.is_alive):
                continue
            if worker is returned:
                worker.weights_at_return = worker.weights
            why = None if allow_mixed else self._why_other(worker)
            if why is None:
                self.unhold(worker, Hold.VERSION)
                continue
            if worker.holds.get(Hold.VERSION) != why:
                logger.warning("worker %s gets no requests: %s", worker.url, why)
            self.hold(worker, Hold.VERSION, why)
        serving = [worker for worker in self.live() if Hold.VERSION not in worker.holds]
        if returned is not None and Hold.VERSION not in returned.holds and returned not in serving:
            serving.append(returned)  # it is marked as alive after this
        if not any(Hold.BROADCAST in worker.holds for worker in self):
            self.accept(serving, "no update through this router brought it")

    def accept(self, workers: Sequence[Worker], warning: str = "") -> None:
        """Remember the weights of workers as those that the fleet serves, if all have one version. A digest is
        remembered unless they differ. Logs the warning where another version was served before."""
        named = {worker: worker.weights for worker in workers if worker.weights is not None}
        versions = {weights.version for weights in named.values()}
        if len(versions) != 1:
            return
        [version] = versions
        digests = {weights.digest for weights in named.values()} - {None}
        before = self.served.weights
        if not digests and before is not None and before.version == version:
            digests = {before.digest}  # a worker's is not known for a moment after a call that failed
        weights = Weights(version, digests.pop() if len(digests) == 1 else None)
        if warning and before is not None and weights.are_other(before):
            logger.warning("the fleet now serves weight version %s instead of %s: %s", weights, before, warning)
        processes = {worker.url: worker.process for worker in named if worker.process is not None}
        self._serve(Served(weights, processes))

    def hold_others(self, updated: Collection[Worker]) -> None:
        """Hold back the live workers that have other weights than those that an update has brought to `updated`."""
        assert self.served.weights is not None
        for worker in self.live():
            if worker in updated or worker.is_draining or worker.weights is None:
                continue
            if worker.weights.are_other(self.served.weights):
                worker.weights_at_return = worker.weights
                why = f"it has weight version {worker.weights}, and an update brought the others {self.served.weights}"
                self.hold(worker, Hold.VERSION, why)

    def _serve(self, served: Served) -> None:
        self.served = served
        self.on_served(served)

    def _agreed(self, without: Worker | None = None) -> list[Weights]:
        """Return the weights of the live workers that are not held for theirs."""
        return [
            worker.weights for worker in self.live()
            if worker is not without and Hold.VERSION not in worker.holds and worker.weights is not None
        ]  # fmt: skip

    def _why_other(self, worker: Worker) -> str | None:
        """Return the reason to hold a worker for its weights; None: there is none. Changes nothing."""
        its, rest, served = worker.weights, self._agreed(without=worker), self.served
        if its is None:
            return None
        if rest:
            alike = [one for one in rest if not its.are_other(one)]
            if not alike:
                listed = ", ".join(sorted(set(map(str, rest))))
                return f"it has weight version {its}, the others {listed}"
            return _why_unnamed(worker, alike)
        if served.weights is None:
            return None
        if worker.process is not None and worker.process == served.processes.get(worker.url):
            return None  # it served them: where it has others, a trainer has updated it since
        if not its.are_other(served.weights):
            return _why_unnamed(worker, [served.weights])
        # None serves. Workers that a trainer has updated directly since they returned serve when all have the same.
        is_updated = worker.weights_at_return is not None and its.are_other(worker.weights_at_return)
        if is_updated and not any(one.weights is None or its.are_other(one.weights) for one in self.live()):
            return None
        return (
            f"it has weight version {its}, and the fleet last served {served.weights}: update the "
            "weights, or enable the worker to accept its version"
        )

    def notify(self) -> None:
        """Call the functions that wait for a change."""
        for call in self.on_change:
            call()


def _why_unnamed(worker: Worker, like: Sequence[Weights]) -> str | None:
    """Return the reason to wait for the digest of a worker that will report one: equal versions are not enough."""
    if worker.guarantee is None or worker.weight_digest is not None or any(one.digest is None for one in like):
        return None
    return f"the digest of its weights {worker.weights} is not known yet, to compare it with {like[0]}"


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
