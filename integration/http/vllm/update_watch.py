"""The clock of an update of vLLM's calls: its client may be gone, and the calls have no deadline for the next one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ....rollout.errors import DeadlineExceeded, LockstepError
from ....weight_sync.errors import SessionBusy, SessionError, WeightSyncError
from ...service import RolloutService
from ..admin.operations import UpdateGate
from ..edge.errors import Busy

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0  # longest time between two strikes of which the first one was in vain


class UpdateWatch:
    """Take an update back whose client makes no call for too long. Any thread may call.

    Sessions that other calls open (`begin_weight_update`) are left alone: they have leases of their own.
    """

    def __init__(self, service: RolloutService, gate: UpdateGate, idle_s: float) -> None:
        """Watch nothing yet. gate: that of updates, which every call of an update holds. idle_s: the longest time
        between two calls."""
        self._service, self._gate, self._idle_s = service, gate, idle_s
        self._opened_at: float | None = None  # of the watched session
        self._why_lost = ""  # why it is taken back at the next turn of the weights
        self._timer: threading.Timer | None = None

    @property
    def is_open(self) -> bool:
        """Whether the watched update is still open."""
        return self._opened_at is not None and self._service.sessions.opened_at == self._opened_at

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Hold the gate and stop the clock during a call of an update. Raises Busy while another one runs.

        Where the update is open afterwards the clock starts again, once the gate is free: it may strike at once.
        """
        with ExitStack() as afterwards, self._gate.enter(what):
            self._stop()
            afterwards.callback(self._start)
            yield

    def begin(self) -> None:
        """Watch the session that was opened last, in a `call`."""
        self._opened_at, self._why_lost = self._service.sessions.opened_at, ""

    def lose(self, why: str) -> None:
        """Have the watched update taken back at the next turn of the weights, in a `call`. Until then it is refused."""
        self._why_lost = why

    def check(self) -> None:
        """Raise SessionError where the watched update was lost, and is not taken back yet."""
        if self._why_lost and self.is_open:
            raise SessionError(f"the weight update is taken back: {self._why_lost}")

    def take_back(self, why: str) -> None:
        """Roll back the watched update, where it is open. The caller holds the gate and has a turn of the weights."""
        if self.is_open:
            self._service.lose_weight_update(why)

    def _start(self) -> None:
        self._start_in(0 if self._why_lost else self._idle_s)

    def _start_in(self, seconds: float) -> None:
        if not self.is_open:
            return
        self._timer = timer = threading.Timer(seconds, self._expire)
        timer.daemon, timer.name = True, "lockstep-update-watch"
        timer.start()

    def _strike_again(self) -> None:
        """Start the clock again after a strike in vain, in its thread. A call that came meanwhile has set another."""
        if threading.current_thread() is self._timer:
            self._start_in(min(self._idle_s, _PAUSE_S))

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        try:
            with self._gate.enter("an update without calls"), self._service.weights_turn("abort_weight_update"):
                if threading.current_thread() is not self._timer:
                    return  # a call came
                why = self._why_lost or f"its client made no call for {self._idle_s:g} s (update_idle_s)"
                if self.is_open:
                    logger.warning("an update is taken back: %s", why)
                self.take_back(why)
        except Busy:  # a call came, which starts the clock again, or one that is none of the update
            self._strike_again()
        except (DeadlineExceeded, SessionBusy) as error:
            logger.warning("an update whose client is gone is still to be taken back: %s", error)
            self._strike_again()
        except (LockstepError, WeightSyncError, ValueError) as error:
            logger.error("an update whose client is gone could not be taken back: %s", error)
