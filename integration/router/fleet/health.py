"""Health checks: one task for each worker that reads its health and its weight version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx

from ..config import RouterConfig
from .workers import Worker, WorkerRegistry

logger = logging.getLogger(__name__)


class HealthChecks:
    """Probes of all watched workers: at an interval, and at once for a worker that is suspect."""

    def __init__(
        self,
        registry: WorkerRegistry,
        client: httpx.AsyncClient,
        config: RouterConfig,
        on_death: Callable[[Worker], None],
    ) -> None:
        self._registry = registry
        self._client = client
        self._config = config
        self._on_death = on_death
        self._tasks: dict[str, asyncio.Task[None]] = {}
        key = config.http.admin_api_key or config.http.api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def watch(self, worker: Worker) -> None:
        """Start the probes of a worker."""
        self._tasks[worker.id] = asyncio.create_task(self._watch(worker), name=f"health {worker.url}")

    def forget(self, worker: Worker) -> None:
        """Stop the probes of a worker."""
        self._tasks.pop(worker.id).cancel()

    async def close(self) -> None:
        """Stop all probes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def check(self, worker: Worker) -> None:
        """Probe a worker once, and update its state by the result."""
        worker.check_now.clear()
        try:
            answer = await self._get(worker, "/health")
            why = None if answer.is_success else f"/health answered {answer.status_code}"
        except httpx.ConnectError as error:
            self._die(worker, f"cannot connect: {error}")
            return
        except httpx.HTTPError as error:
            why = f"/health failed: {type(error).__name__} {error}".strip()
        if why is None:
            try:
                await self._learn(worker)
            except httpx.HTTPError as error:
                why = f"its probe failed: {type(error).__name__} {error}".strip()
        if why is None:
            worker.num_failed_probes = 0
            return
        worker.num_failed_probes += 1
        worker.last_error = why
        if worker.num_failed_probes >= self._config.dead_after:
            self._die(worker, why)

    async def read_version(self, worker: Worker) -> str | None:
        """Read the weight version of a worker, or None where it reports none. Raises httpx.HTTPError."""
        for path in ("/get_weight_version", "/model_info"):
            values = _object(await self._get(worker, path))
            if isinstance(version := values.get("weight_version"), str):
                worker.weight_version = version
                return version
        return None

    async def _watch(self, worker: Worker) -> None:
        while True:
            try:
                await self.check(worker)
            except Exception as error:  # any error: if this task ended, the worker would not be probed again
                logger.exception("the probe of worker %s failed", worker.url)
                self._die(worker, f"its probe failed: {type(error).__name__}")
            try:
                async with asyncio.timeout(self._config.health_interval_s):
                    await worker.check_now.wait()
            except TimeoutError:
                pass

    async def _learn(self, worker: Worker) -> None:
        """Read a worker's version and readiness, and, where another process may have its address, its identity."""
        returns, known = not worker.is_alive, worker.weight_version
        if await self.read_version(worker) != known:
            worker.is_suspect = True  # an update, or another process that was started between two probes
        if returns or worker.is_suspect:
            info = _object(await self._get(worker, "/server_info"))
            started = info.get("startup_time")
            if not returns and started != worker.startup_time:
                self._die(worker, "another process answers at its address")
                returns = True
            worker.startup_time, worker.is_suspect = started, False
            sizes = [size for name in ("tp_size", "pp_size") if isinstance(size := info.get(name), int) and size > 0]
            worker.num_ranks = sizes[0] * sizes[1] if len(sizes) == 2 else 1
        ready = await self._get(worker, "/ready")
        if ready.status_code in (200, 503):
            worker.paused = ready.status_code == 503
        self._registry.check_versions(self._config.allow_mixed_versions, worker if returns else None)
        self._registry.mark_alive(worker)

    def _die(self, worker: Worker, why: str) -> None:
        was_alive = worker.is_alive
        self._registry.mark_dead(worker, why)
        if was_alive:
            self._on_death(worker)

    async def _get(self, worker: Worker, path: str) -> httpx.Response:
        return await self._client.get(worker.url + path, headers=self._headers, timeout=self._config.health_timeout_s)


def _object(answer: httpx.Response) -> dict[str, object]:
    try:
        values = answer.json() if answer.is_success else {}
    except (ValueError, RecursionError):
        values = {}
    return values if isinstance(values, dict) else {}
