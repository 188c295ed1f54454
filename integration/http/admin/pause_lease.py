"""A pause that ends by itself if its client does not end it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ....rollout.errors import LockstepError
from ....weight_sync.errors import WeightSyncError
from ...service import RolloutService

logger = logging.getLogger(__name__)

_MOMENT_S = 1e-3  # an expired lease waits so long for a trainer's rollout phase, and tries again after its ttl


class PauseLease:
    """The deadline of the current pause, if it has one; the last pause sets it. Any thread may call."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._lock = threading.Lock()  # held while a pause begins or ends: an old lease must not end a new pause
        self._timer: threading.Timer | None = None
        self._deadline: float | None = None  # of time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until generation continues by itself; None: without a deadline."""
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @contextmanager
    def changing(self, ttl_s: float | None = None) -> Iterator[None]:
        """Hold the lease while a pause begins or ends. After success it lasts `ttl_s` seconds; None: no lease."""
        with self._lock:
            yield
            self._set(ttl_s)

    def cancel(self) -> None:
        """Remove the deadline: the current pause does not end by itself."""
        with self._lock:
            self._set(None)

    def _set(self, ttl_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._deadline = None
        if ttl_s is not None:
            self._deadline = time.monotonic() + ttl_s
            self._timer = threading.Timer(ttl_s, self._expire, (ttl_s,))
            self._timer.daemon, self._timer.name = True, "lockstep-pause-lease"
            self._timer.start()

    def _expire(self, ttl_s: float) -> None:
        with self._lock:
            if threading.current_thread() is not self._timer:
                return  # another pause came, or this one has ended
            if not self._service.engine.is_paused:
                self._set(None)
                return
            try:
                with self._service.turn_to_commit("continue_generation", _MOMENT_S):
                    self._service.continue_generation()
            except (LockstepError, WeightSyncError, ValueError) as error:
                logger.error("the pause expired after %g s, but generation cannot continue: %s", ttl_s, error)
                self._set(ttl_s)  # try again: the obstacle may be gone then
            else:
                logger.warning("the pause expired after %g s (ttl): generation continues", ttl_s)
                self._set(None)
