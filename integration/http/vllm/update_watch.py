"""The clock of an update of vLLM's calls: its client may be gone, and the calls have no deadline for the next one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ....rollout.errors import LockstepError
from ....weight_sync.errors import WeightSyncError
from ...service import RolloutService
from ..admin.operations import UpdateGate
from ..edge.errors import Busy

logger = logging.getLogger(__name__)


class UpdateWatch:
    """Take an update back whose client makes no call for too long. Any thread may call.

    Sessions that other calls open (`begin_weight_update`) are left alone: they have leases of their own.
    """

    def __init__(self, service: RolloutService, gate: UpdateGate, idle_s: float) -> None:
        """Watch nothing yet. gate: that of updates, which every call of an update holds. idle_s: the longest time
        between two calls."""
        self._service, self._gate, self._idle_s = service, gate, idle_s
        self._opened_at: float | None = None  # of the watched session
        self._timer: threading.Timer | None = None

    @property
    def is_open(self) -> bool:
        """Whether the watched update is still open."""
        return self._opened_at is not None and self._service.sessions.opened_at == self._opened_at

    @contextmanager
    def call(self) -> Iterator[None]:
        """Stop the clock during a call of an update, and start it again where the update is open afterwards. The caller
        holds the gate."""
        self._stop()
        try:
            yield
        finally:
            if self.is_open:
                self._start()

    def begin(self) -> None:
        """Watch the session that was opened last, in a `call`."""
        self._opened_at = self._service.sessions.opened_at

    def take_back(self, why: str) -> None:
        """Roll back the watched update, where it is open. The caller holds the gate and has a turn of the weights."""
        if self.is_open:
            self._service.lose_weight_update(why)

    def _start(self) -> None:
        self._timer = threading.Timer(self._idle_s, self._expire)
        self._timer.daemon, self._timer.name = True, "lockstep-update-watch"
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        try:
            with self._gate.enter("an update without calls"), self._service.weights_turn("abort_weight_update"):
                if threading.current_thread() is not self._timer:
                    return  # a call came
                if self.is_open:
                    logger.warning("an update is taken back: its client made no call for %g s", self._idle_s)
                self.take_back(f"its client made no call for {self._idle_s:g} s (update_idle_s)")
        except Busy:
            return  # a call came, and starts the clock again
        except (LockstepError, WeightSyncError, ValueError) as error:
            logger.error("an update whose client is gone could not be taken back: %s", error)
