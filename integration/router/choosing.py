"""The choice of a worker: for a new request, for a stream that goes on, and for a second try at the same time."""

from __future__ import annotations

from ..http.edge.errors import HttpError
from .config import RouterConfig
from .counters import Affinity, RouterCounters
from .course import Course, Generation
from .fleet.balance import PrefixTable, WorkerLoad, choose
from .fleet.worker import Worker
from .fleet.workers import WorkerRegistry, why_none
from .moving.progress import Progress


class Chooser:
    """The workers of a router, and the prompts that they know."""

    def __init__(self, registry: WorkerRegistry, config: RouterConfig, counters: RouterCounters) -> None:
        self._registry, self._config, self._counters = registry, config, counters
        self._prefixes = PrefixTable(config.max_prefixes)

    def forget(self, worker: Worker) -> None:
        """Forget the prompts of a worker whose cache is lost."""
        self._prefixes.forget(worker.id)

    def like(self, progress: Progress, course: Course) -> Worker | None:
        """Return the least loaded worker that can go on with a stream; None while one of them may yet be able to.
        Raises HttpError 409 naming the reason of each worker where none can."""
        whys = {worker: progress.why_not(worker) for worker in self._registry}
        able = [worker for worker, why in whys.items() if why is None and worker.can_take_requests]
        able = [worker for worker in able if not course.is_full(worker)] or able
        failed = {url for url, _ in course.failures}
        able = [one for one in able if one.url not in failed] or [one for one in able if not one.is_suspect]
        able = [worker for worker in able if not worker.paused] or able
        if able:
            return min(able, key=lambda worker: (worker.num_running, worker.num_routed, worker.id))
        if all(why is not None and worker.is_known for worker, why in whys.items()):
            raise HttpError(409, self.why_none_like(progress), code="cannot_go_on")
        return None

    def maybe_like(self, progress: Progress) -> list[Worker]:
        """Return the workers that can go on with a stream, or may yet be able to. Changes nothing."""
        return [one for one in self._registry if not one.is_known or progress.why_not(one) is None]

    def why_none_like(self, progress: Progress) -> str:
        """Explain why no worker goes on with a stream, worker by worker. Changes nothing."""
        whys = {worker: progress.why_not(worker) for worker in self._registry}
        listed = "; ".join(f"{worker.url}: {why}" for worker, why in whys.items() if why and worker.is_known)
        return listed or why_none(self._registry)

    def has_room_for(self, progress: Progress) -> bool:
        """Return whether a worker can go on with a stream at once."""
        return any(one.can_take_requests and not one.paused and progress.why_not(one) is None for one in self._registry)

    def best(self, generation: Generation, course: Course) -> Worker | None:
        tried = {url for url, _ in course.failures}
        able = [worker for worker in self._registry if worker.can_take_requests]
        able = [worker for worker in able if not course.is_full(worker)] or able
        # A worker that failed this request gets it again only if a probe has found it well since.
        able = [one for one in able if one.url not in tried] or [one for one in able if not one.is_suspect]
        # Requests wait in a paused engine, so one is chosen only if all engines are paused.
        able = [worker for worker in able if not worker.paused] or able
        if not able:
            return None
        knowing = self._prefixes.knowing(generation.keys)
        loads = [WorkerLoad(worker.id, worker.num_running, worker.num_routed) for worker in able]
        worker = self._registry.find(choose(loads, knowing, self._config.affinity_slack))
        is_known = any(one.id in knowing for one in able)
        hit = Affinity.HIT if worker.id in knowing else Affinity.TOO_BUSY if is_known else Affinity.UNKNOWN
        self._counters.affinity[hit] += 1
        self._prefixes.record(generation.keys, worker.id)
        return worker

    def twin(self, worker: Worker, course: Course) -> Worker | None:
        """Return the least loaded other worker whose answers have the same bits; None: there is none. Changes
        nothing."""
        able = [
            one for one in self._registry
            if one is not worker and one.can_take_requests and not one.paused and not course.is_full(one)
            and one.weight_digest is not None and one.weight_digest == worker.weight_digest
            and one.guarantee == worker.guarantee and (one.guarantee or {}).get("invariant")
        ]  # fmt: skip
        return min(able, key=lambda one: (one.num_running, one.num_routed, one.id), default=None)
