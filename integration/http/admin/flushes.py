"""A wait for an idle engine, to flush its cache then. All clients that wait share it."""

from __future__ import annotations

import asyncio

from ....rollout.engine import Engine
from ....rollout.loop.commands import FlushReport
from ..edge.threads import Threads

_LOOK_AGAIN_S = 0.02  # between two attempts: no event reports that all requests have ended


class Flushes:
    """Attempts to flush one engine's cache, as long as a client waits. Used by one event loop."""

    def __init__(self, engine: Engine, threads: Threads) -> None:
        self._engine, self._threads = engine, threads
        self.num_waiting = 0  # clients
        self._attempts: asyncio.Task[FlushReport] | None = None

    async def wait(self, timeout_s: float) -> FlushReport | None:
        """Wait until the cache is flushed; None after `timeout_s`. The attempts end with the last client."""
        if self._attempts is None:
            self._attempts = asyncio.create_task(self._attempt())
        attempts = self._attempts
        self.num_waiting += 1
        try:
            done, _ = await asyncio.wait({attempts}, timeout=max(timeout_s, 0))
            return attempts.result() if done else None
        finally:
            self.num_waiting -= 1
            if self._attempts is attempts and (attempts.done() or not self.num_waiting):
                self._attempts = None
                attempts.cancel()

    async def _attempt(self) -> FlushReport:
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            report = await self._threads.run(self._engine.flush_cache)
            if report.success:
                return report
