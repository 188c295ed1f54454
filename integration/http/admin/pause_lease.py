"""A pause that ends by itself if its client does not end it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ....rollout.errors import DeadlineExceeded, LockstepError
from ....rollout.loop.commands import ContinueReport
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
    def changing(self, ttl_s: float | None = None, timeout_s: float | None = None) -> Iterator[float | None]:
        """Hold the lease while a pause begins or ends. After success it lasts `ttl_s` seconds; None: no lease. Yields
        the seconds that are left of `timeout_s`; None: no limit. Raises DeadlineExceeded if none are left.

        Wait for a weight update before, not in the block: other pauses wait for its end.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            raise DeadlineExceeded(f"another pause or its end took longer than the {timeout_s:.3g} s that were left")
        try:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"the {timeout_s:.3g} s that were left have passed")
            yield left
            self._set(ttl_s)
        finally:
            self._lock.release()

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
        if threading.current_thread() is not self._timer:
            return  # another pause came, or this one has ended
        why: Exception | None = None
        try:
            if self._service.engine.is_paused:
                with self._service.turn_to_commit("continue_generation", _MOMENT_S):
                    self._service.commit_implicit_update()  # waits for an update: without the lock
        except (LockstepError, WeightSyncError, ValueError) as error:
            why = error
        with self._lock:
            if threading.current_thread() is not self._timer:
                return
            if not self._service.engine.is_paused:
                self._set(None)
                return
            try:
                if why is None:
                    self._service.continue_generation()
            except (LockstepError, WeightSyncError, ValueError) as error:
                why = error
            if why is not None:
                logger.error("the pause expired after %g s, but generation cannot continue: %s", ttl_s, why)
                self._set(ttl_s)  # try again: the obstacle may be gone then
            else:
                logger.warning("the pause expired after %g s (ttl): generation continues", ttl_s)
                self._set(None)


def end_pause(service: RolloutService, lease: PauseLease, timeout_s: float | None) -> ContinueReport:
    """Commit an implicit update, then continue generation. Raises DeadlineExceeded if `timeout_s` passes before
    generation continues, and the errors of both."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with service.turn_to_commit("continue_generation", timeout_s):
        if not service.sessions.is_open:
            service.commit_implicit_update()  # waits for an update: before the lease is held
        left = None if deadline is None else deadline - time.monotonic()
        with lease.changing(timeout_s=left) as still_left:
            return service.continue_generation(timeout_s=still_left)
