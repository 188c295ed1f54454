"""The digest of the weights, which the tokens of receipts and of streams that may move need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from ....rollout.engine import Engine
from ....rollout.request_options import RequestOptions
from .asked import Asked


class WeightNaming:
    """Give the weights their digest when a request needs it: one call for all that wait for it, of one event loop.

    It takes seconds for a large model. The requests wait in the event loop, so that others find their threads free.
    """

    def __init__(self, engine: Engine, name_weights: Callable[[], object], threads: Executor) -> None:
        """Create it. name_weights: computes the digest; threads: one of them runs it."""
        self._engine, self._name_weights, self._threads = engine, name_weights, threads
        self._running: asyncio.Future[object] | None = None

    def is_due(self, asked: Asked) -> bool:
        """Return whether a request needs a digest, and the weights have none. Any thread may call."""
        if self._engine.weight_digest is not None:
            return False
        return asked.names_weights or any(map(self._has_receipt, asked.options))

    async def run(self) -> None:
        """Wait until the weights have a digest, if they can have one now. Raises the errors of `name_weights`."""
        if self._engine.weight_digest is not None:
            return
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().run_in_executor(self._threads, self._name_weights)
        await asyncio.shield(self._running)

    def _has_receipt(self, options: RequestOptions) -> bool:
        asked: object = options.return_receipt
        return asked not in (None, False) or (asked is None and self._engine.config.receipts != "off")
