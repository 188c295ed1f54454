"""The workers of a router: their list, their health, and whether they may get requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ..config import worker_url
from .pauses import Pauses
from .served import Served
from .versions import Comparison, served_by
from .worker import Health, Hold, Worker

logger = logging.getLogger(__name__)


class UnknownWorker(LookupError):
    """No worker has this id or URL."""


class WorkerRegistry:
    """All workers in the order in which they were added."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._registrations = itertools.count()
        self.served = Served()  # on which the workers last agreed; kept while all are dead
        self.served_file: Path | None = None  # in which it is kept for a restarted router
        self.on_served: Callable[[Served], None] = lambda served: None  # called with it by each check
        self.pauses = Pauses()
        self.is_changing = False  # an administrative change is under way
        self.has_open_update = False  # an update is in progress, also between the calls of a session
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
        worker = Worker(url, worker_id, disabled, registration=next(self._registrations))
        self._workers[worker_id] = worker
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
        self.check_pause()
        self.notify()

    def live(self) -> list[Worker]:
        """List the workers that are alive."""
        return [worker for worker in self if worker.is_alive]

    def twin_of(self, worker: Worker) -> Worker | None:
        """Return the live worker that is the same process at the same port under another address; None: there is none.
        One process may have several workers at several ports. A start in whole seconds names no process."""
        if not isinstance(worker.process, float) or worker.process.is_integer():
            return None
        alike = (one for one in self.live() if one.process == worker.process and one.port == worker.port)
        return next((one for one in alike if one is not worker), None)

    def set_disabled(self, worker: Worker, disabled: bool) -> None:
        """Disable or enable a worker for an operator. Enabling also ends the holds after a failed group init and for a
        pause, and accepts the weight version of a worker that is held for it, if no other live worker serves another
        version."""
        worker.disabled = disabled
        if not disabled:
            self.end_group(worker)
            worker.holds.pop(Hold.PAUSE, None)
            its, compared = worker.weights, self._compared()
            is_held = worker.is_alive and Hold.VERSION in worker.holds
            if is_held and its is not None and not compared.serves_other(worker):
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

    def miss_group(self, worker: Worker, group: str, why: str) -> None:
        """Send no requests to a worker that did not join a group which others have joined: it may not be well."""
        worker.not_joined[group] = why
        self.hold(worker, Hold.GROUP, "; ".join(worker.not_joined.values()))

    def end_group(self, worker: Worker, group: str | None = None) -> None:
        """End the hold of a worker that did not join a group, which is over; None: any, since the worker is well."""
        left = {name: why for name, why in worker.not_joined.items() if group is not None and name != group}
        worker.not_joined = left
        if left:
            worker.holds[Hold.GROUP] = "; ".join(left.values())
        else:
            self.unhold(worker, Hold.GROUP)

    def check_pause(self) -> None:
        """End the hold of the workers that came while the fleet was paused, where it goes on."""
        if self.pauses.look(list(self._workers.values())):
            for worker in self:
                self.unhold(worker, Hold.PAUSE)

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
        self.check_pause()

    def mark_draining(self, worker: Worker) -> None:
        """Mark a worker as draining. It gets no new requests; its open ones go on."""
        if not worker.is_draining:
            logger.info("worker %s is draining: it gets no new requests", worker.url)
            self._revive(worker, Health.DRAINING)
            worker.drains.set()

    def _revive(self, worker: Worker, health: Health) -> None:
        if not worker.is_alive:
            worker.died, worker.drains = asyncio.Event(), asyncio.Event()
            if (why := self.pauses.why) is not None:
                worker.holds[Hold.PAUSE] = why
        if worker.is_gone:  # another process
            self.end_group(worker)
        worker.is_gone = False
        self._become(worker, health)

    def _become(self, worker: Worker, health: Health) -> None:
        worker.health = health
        self.notify()

    def check_versions(self, allow_mixed: bool, returned: Worker | None = None) -> None:
        """Hold `returned` back if its weights, by version and digest, are others than all other workers' or, without
        others, than those that the fleet last served. Hold workers that serve beside others of their version as soon as
        their digests are seen to differ. End this hold of the workers whose weights are the same again, or that were
        all updated since they returned. Then remember the weights on which the workers without this hold agree, though
        not in the middle of a change, which some may have made already."""
        if returned is not None:
            returned.weights_at_return = returned.weights
        strays = [] if allow_mixed or self.is_changing else self._compared().strays()
        for worker in strays:  # all of them before one is compared with the rest
            worker.holds[Hold.VERSION] = ""
        for worker in self:
            if worker is not returned and (Hold.VERSION not in worker.holds or not worker.is_alive):
                continue
            why = None if allow_mixed else self._compared().why_other(worker)
            if why is None:
                self.unhold(worker, Hold.VERSION)
                continue
            if worker.holds.get(Hold.VERSION) != why:
                logger.warning("worker %s gets no requests: %s", worker.url, why)
            self.hold(worker, Hold.VERSION, why)
        serving = [worker for worker in self.live() if Hold.VERSION not in worker.holds]
        if returned is not None and Hold.VERSION not in returned.holds and returned not in serving:
            serving.append(returned)  # it is marked as alive after this
        if not self.is_changing and not any(Hold.BROADCAST in worker.holds for worker in self):
            self.accept(serving, "no update through this router brought it")

    def accept(self, workers: Sequence[Worker], warning: str) -> None:
        """Remember the weights of workers as those that the fleet serves, if all have one version, see `served_by`.
        Logs the warning where others were served before."""
        before, now = self.served.weights, served_by(workers, self.served)
        if now is None or now.weights is None:
            return
        if before is not None and now.weights.are_other(before):
            logger.warning("the fleet now serves weight version %s instead of %s: %s", now.weights, before, warning)
        self._serve(now)

    def accept_update(self, workers: Sequence[Worker], allow_mixed: bool) -> None:
        """Remember the weights that an update has brought to workers, and hold back the live workers that have others,
        or that may have others under the same version."""
        if (now := served_by(workers, self.served, is_update=True)) is None or now.weights is None:
            return
        self._serve(now)
        for worker in () if allow_mixed else self.live():
            its = worker.weights
            if worker in workers or worker.is_draining or its is None:
                continue
            if its.are_other(now.weights):
                why = f"it has weight version {its}, and an update brought the others {now.weights}"
            elif (unsure := self._compared().why_other(worker)) is not None:
                why = unsure
            else:
                continue
            worker.weights_at_return = its
            self.hold(worker, Hold.VERSION, why)

    def awaits_update(self, worker: Worker) -> bool:
        """Return whether a worker gets requests only after an update, which is not under way, or by an operator, since
        it has other weights than the fleet last served. Changes nothing."""
        return not self.is_changing and not self.has_open_update and self._compared().awaits_update(worker)

    def _compared(self) -> Comparison:
        return Comparison(self.live(), self.served, self.served_file)

    def _serve(self, served: Served) -> None:
        self.served = served
        self.on_served(served)

    def notify(self) -> None:
        """Call the functions that wait for a change."""
        for call in self.on_change:
            call()


def needs_operator(registry: WorkerRegistry) -> bool:
    """Return whether no worker can take requests again without an operator, or an update that has yet to begin. False
    where there are no workers: some may be added."""
    workers = list(registry)
    return bool(workers) and all(worker.needs_operator or registry.awaits_update(worker) for worker in workers)


def why_none(workers: Iterable[Worker]) -> str:
    """Explain why none of these workers takes requests, worker by worker."""
    said = []
    for worker in workers:
        if worker.health is not Health.ALIVE:
            why = f" ({worker.last_error})" if worker.last_error and not worker.is_draining else ""
            said.append(f"{worker.url} is {worker.health.value}{why}")
        elif worker.disabled:
            said.append(f"{worker.url} is disabled")
        elif worker.holds:
            said.append(f"{worker.url} is held: {'; '.join(worker.holds.values())}")
        elif worker.paused and not worker.is_suspect:
            said.append(f"{worker.url} is paused")
        else:
            said.append(f"{worker.url} is being asked whether it is well ({worker.last_error})")
    return "; ".join(said) or "there are none"
