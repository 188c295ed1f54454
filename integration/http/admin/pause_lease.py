"""A pause that ends by itself where its client does not come back."""

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

_MOMENT_S = 1e-3  # that a lease which expires waits for a trainer's rollout phase: it comes again


class PauseLease:
    """At most one deadline for the pause that holds; the last pause decides. Any thread may call."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._lock = threading.Lock()  # held while a pause begins or ends: one that is over ends no other
        self._timer: threading.Timer | None = None
        self._deadline: float | None = None  # of time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        """Until generation continues by itself; None: it does not."""
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @contextmanager
    def changing(self, ttl_s: float | None = None) -> Iterator[None]:
        """A pause begins or ends in here; if that succeeds, the lease is `ttl_s` long from then on, None: none."""
        with self._lock:
            yield
            self._set(ttl_s)

    def cancel(self) -> None:
        """The pause that holds does not end by itself."""
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
                self._set(ttl_s)  # once more: what is in the way may have gone by then
            else:
                logger.warning("the pause expired after %g s (ttl): generation continues", ttl_s)
                self._set(None)
