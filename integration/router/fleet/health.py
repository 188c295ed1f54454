"""Health checks: one task for each worker that reads its health and its weight version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from ..calls import PLAIN, ROUTER_HEADER, WorkerCall
from ..config import RouterConfig
from ..wire import Answer, NobodyListens, NoDescriptors, NotReached, Wire, WorkerFailed
from .worker import Health, Worker
from .workers import WorkerRegistry

logger = logging.getLogger(__name__)

_MAX_REPORT_BYTES = 4 << 20  # of an answer to a probe
_MAX_VERSION = 4096  # characters of a weight version, which is kept on disk
_MAX_DIGEST = 256
_NOT_IMPLEMENTED = 501
_LOOP = 508


class HealthChecks:
    """Probes of all watched workers: at an interval, and at once for a worker that is suspect."""

    def __init__(
        self,
        registry: WorkerRegistry,
        wire: Wire,
        config: RouterConfig,
        on_death: Callable[[Worker], None],
        router: str = "",
    ) -> None:
        """Prepare the probes. router: the name of the router, by which it knows its own calls."""
        self._registry = registry
        self._wire = wire
        self._config = config
        self._on_death = on_death
        self.after_probe: Callable[[], Awaitable[None]] | None = None  # awaited after each regular probe
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._probes: dict[Worker, asyncio.Task[None]] = {}  # that are under way
        self._leaving: set[asyncio.Task[None]] = set()  # of workers that were removed
        key = config.http.admin_api_key or config.http.api_key
        authorization = ((b"authorization", f"Bearer {key}".encode()),) if key else ()
        self._headers = (*authorization, (ROUTER_HEADER, router.encode()), PLAIN)

    def watch(self, worker: Worker) -> None:
        """Start the probes of a worker."""
        self._tasks[worker.id] = asyncio.create_task(self._watch(worker), name=f"health {worker.url}")

    def forget(self, worker: Worker) -> None:
        """Stop the probes of a worker that was removed. While it has open requests its health alone is probed, since
        they leave a worker that is dead."""
        self._tasks.pop(worker.id).cancel()
        if (probe := self._probes.get(worker)) is not None:
            probe.cancel()
        leaving = asyncio.create_task(self._see_off(worker), name=f"health {worker.url}, removed")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Stop all probes."""
        tasks = [*self._tasks.values(), *self._leaving, *self._probes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, worker: Worker) -> None:
        """Probe a worker once, and update its state by the result. A probe that is under way is the one of all that ask
        meanwhile, unless the worker has become suspect since it began: then it is followed by one more."""
        if (earlier := self._probes.get(worker)) is not None and worker.check_now.is_set():
            await asyncio.wait({earlier})
        probe = self._probes.get(worker) or self._begin(worker)
        await asyncio.wait({probe})
        if not probe.cancelled():  # it is where the worker is removed
            probe.result()

    def _begin(self, worker: Worker) -> asyncio.Task[None]:
        worker.check_now.clear()
        probe = self._probes[worker] = asyncio.create_task(self._check(worker))
        probe.add_done_callback(lambda done: self._probes.pop(worker))
        return probe

    async def _check(self, worker: Worker) -> None:
        is_reached = True
        try:
            why = await self._probe(worker)
        except NoDescriptors as error:
            if worker.last_error != str(error):
                logger.warning("worker %s is not probed: %s", worker.url, error)
            worker.last_error = str(error)
            return
        except NobodyListens as error:
            self._die(worker, str(error), is_gone=True)
            return
        except WorkerFailed as error:
            why, is_reached = f"its probe failed: {error}", not isinstance(error, NotReached)
        else:
            if why is not None:
                self._registry.mark_starting(worker)
        if why is None:
            worker.num_failed_probes = 0
            return
        worker.num_failed_probes += 1
        worker.last_error = why
        if worker.num_failed_probes >= self._config.dead_after:
            self._die(worker, why, is_gone=not is_reached)

    async def _probe(self, worker: Worker) -> str | None:
        """Ask a worker for its state. Returns the reason for which it is not healthy. Raises WorkerFailed."""
        health = await self._get(worker, "/health")
        if health.is_success:
            if worker in self._registry:
                await self._learn(worker)
        elif _is_draining(await self._get(worker, "/ready")):
            self._registry.mark_draining(worker)
        elif health.status == _LOOP:
            return "it leads back to this router"
        else:
            return f"/health answered {health.status}"
        return None

    async def read_version(self, worker: Worker) -> str | None:
        """Read the weight version of a worker, with the digest where it reports one. Returns the version, or None where
        it reports none. Raises WorkerFailed."""
        failed: WorkerFailed | None = None
        for path in ("/get_weight_version", "/model_info"):
            try:
                values = await self._get_object(worker, path, "weight_digest=1") or {}
            except NotReached:
                raise
            except WorkerFailed as error:
                failed = error  # the other path may answer
                continue
            if isinstance(version := values.get("weight_version"), str):
                self._note_version(worker, path, version, values)
                return version
        if failed is not None:
            raise failed
        return None

    def _note_version(self, worker: Worker, path: str, version: str, values: Mapping[str, object]) -> None:
        if len(version) > _MAX_VERSION:
            raise WorkerFailed(f"GET {path}: its weight version has {len(version)} characters")
        if not _is_whole(version):
            raise WorkerFailed(f"GET {path}: its weight version {version!a} has half of a surrogate pair")
        if version != worker.weight_version:  # an update, or another process
            worker.weight_digest, worker.is_suspect = None, True
        worker.weight_version = version
        if "weight_digest" in values and (digest := _digest_of(values)) != worker.weight_digest:
            worker.weight_digest = digest
            self._registry.notify()  # a stream may wait for a worker with this digest

    async def _watch(self, worker: Worker) -> None:
        while True:
            try:
                await self.check(worker)
                if self.after_probe is not None:
                    await self.after_probe()
            except Exception as error:  # any error: if this task ended, the worker would not be probed again
                logger.exception("the probe of worker %s failed", worker.url)
                self._die(worker, f"its probe failed inside the router: {error}")
            await self._until_next(worker)

    async def _see_off(self, worker: Worker) -> None:
        while worker.num_running and worker.is_alive:
            await self.check(worker)
            await self._until_next(worker)

    async def _until_next(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._config.health_interval_s):
                await worker.check_now.wait()
        except TimeoutError:
            pass

    async def _learn(self, worker: Worker) -> None:
        """Read a worker's version and readiness, and, where another process may have its address, its identity."""
        returns, is_looked_at = worker.health is not Health.ALIVE, False
        await self.read_version(worker)
        is_unnamed = worker.guarantee is not None and worker.weight_digest is None
        if returns or worker.is_suspect or is_unnamed:
            info = await self._get_object(worker, "/server_info", "name_weights=1")
            if info is None and worker.is_alive and worker.startup_time is not None:
                raise WorkerFailed("GET /server_info: it does not say any more which process it is")
            info = info or {}
            started = info.get("startup_time")
            if started != worker.startup_time:
                if worker.is_alive:
                    self._die(worker, "another process answers at its address")
                    returns = True
                worker.is_gone = True  # the process before
            worker.startup_time, worker.is_suspect, is_looked_at = started, False, True
            guarantee = info.get("guarantee")
            worker.weight_digest = _digest_of(info)
            worker.guarantee = guarantee if isinstance(guarantee, dict) else None
            sizes = [size for name in ("tp_size", "pp_size") if isinstance(size := info.get(name), int) and size > 0]
            worker.num_ranks = sizes[0] * sizes[1] if len(sizes) == 2 else 1
        num_changes = self._registry.pauses.num_changes
        ready = await self._get(worker, "/ready")
        if returns and (twin := self._registry.twin_of(worker)) is not None:
            raise WorkerFailed(f"it is the same process as {twin.url}, under another address")
        if _is_draining(ready):
            self._registry.mark_draining(worker)
            return
        if ready.status in (200, 503) and num_changes == self._registry.pauses.num_changes:
            worker.paused = ready.status == 503
        self._registry.check_versions(self._config.allow_mixed_versions, worker if returns else None)
        self._registry.mark_alive(worker)
        if is_looked_at:
            self._registry.notify()  # a request may wait for this

    def _die(self, worker: Worker, why: str, *, is_gone: bool = False) -> None:
        was_alive = worker.is_alive
        mark = self._registry.mark_gone if is_gone else self._registry.mark_dead
        mark(worker, why)
        if was_alive:
            self._on_death(worker)

    async def _get(self, worker: Worker, path: str, query: str = "") -> Answer:
        call = WorkerCall("GET", path, query, self._headers, b"")
        try:
            return await self._wire.fetch(worker.url, call, _MAX_REPORT_BYTES, self._config.health_timeout_s)
        except NotReached:
            raise
        except WorkerFailed as error:
            raise WorkerFailed(f"GET {path}: {error}") from error

    async def _get_object(self, worker: Worker, path: str, query: str = "") -> dict[str, object] | None:
        """Read a report. Returns None where the worker has none, or wants another key for it. Raises WorkerFailed, also
        where it could not make it."""
        answer = await self._get(worker, path, query)
        if answer.status >= 500 and answer.status != _NOT_IMPLEMENTED:
            raise WorkerFailed(f"GET {path}: it answered {answer.status}")
        return answer.object() if answer.is_success else None


def _is_whole(text: str) -> bool:
    """Return whether a text can be written: JSON may name halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest_of(report: Mapping[str, object]) -> str | None:
    digest = report.get("weight_digest")
    return digest if isinstance(digest, str) and len(digest) <= _MAX_DIGEST and _is_whole(digest) else None


def _is_draining(ready: Answer) -> bool:
    return ready.status == 503 and ready.object().get("status") == "draining"
