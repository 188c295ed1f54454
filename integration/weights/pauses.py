"""The verbs of a service that pause generation, and continue it; and a pause that ends by itself."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ...rollout.engine import Engine
from ...rollout.errors import DeadlineExceeded, LockstepError, SamplingRefused
from ...rollout.loop.commands import ContinueReport, PauseMode, PauseReport
from ...weight_sync.deadline import Deadline
from ...weight_sync.errors import SessionBusy, SessionError, WeightSyncError
from .options import check_client
from .sessions import WeightSessions

logger = logging.getLogger(__name__)

_MOST_GONE = 1024  # names of clients that are gone
_MOMENT_S = 1e-3  # an expired lease waits so long for a trainer's rollout phase, and tries again after its ttl


class PauseLease:
    """The deadline of the current pause, if it has one; the last pause sets it. Any thread may call."""

    def __init__(self, service: PauseVerbs) -> None:
        self._service = service
        self._lock = threading.Lock()  # held while a pause begins or ends: an old lease must not end a new pause
        self._timer: threading.Timer | None = None
        self._deadline: float | None = None  # of time.monotonic()
        self._ttl_s: float | None = None
        self._client: str | None = None  # that has begun the pause; None: it has no name

    @property
    def seconds_left(self) -> float | None:
        """Seconds until generation continues by itself; None: without a deadline."""
        deadline = self._deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @contextmanager
    def changing(
        self,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
        *,
        keeps_other: bool = False,
        client: str | None = None,
    ) -> Iterator[float | None]:
        """Hold the lease while a pause of `client` begins or ends. After success it lasts `ttl_s` seconds; None: no
        lease. keeps_other: where generation is paused already, the lease of that pause, or that it has none, stays, and
        its client. Yields the seconds that are left of `timeout_s`; None: no limit. Raises DeadlineExceeded if none are
        left, SessionError for a client that is gone.

        Wait for a weight update before, not in the block: other pauses wait for its end.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            raise DeadlineExceeded(f"another pause or its end took longer than the {timeout_s:.3g} s that were left")
        try:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"the {timeout_s:.3g} s that were left have passed")
            self._service.clients.check(client)
            stays = keeps_other and self._service.engine.is_paused
            yield left
            if not stays:
                self._set(ttl_s)
                self._client = client
        finally:
            self._lock.release()

    @contextmanager
    def ending(self, client: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold the lease while a pause ends that this client has begun; yields whether it has."""
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0)):
            raise DeadlineExceeded(f"another pause or its end took longer than the {timeout_s:.3g} s that were left")
        try:
            is_its = self._client == client and self._service.engine.is_paused
            yield is_its
            if is_its:
                self._set(None)
                self._client = None
        finally:
            self._lock.release()

    def renew(self) -> None:
        """Begin the present lease anew, if there is one: its client has been heard."""
        with self._lock:
            self._set(self._ttl_s)

    def cancel(self) -> None:
        """Remove the deadline: the current pause does not end by itself."""
        with self._lock:
            self._set(None)

    def _set(self, ttl_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._deadline = None
        self._ttl_s = ttl_s
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
            if self._service.engine.is_paused and not self._service.sessions.is_open:
                with self._service.turn_to_commit("continue_generation", _MOMENT_S):
                    # Waits for an update: without the lock.
                    self._service.end_implicit_update(f"the pause of its client expired after {ttl_s:g} s")
        except (LockstepError, WeightSyncError, ValueError) as error:
            why = error
        with self._lock:
            if threading.current_thread() is not self._timer:
                return
            if not self._service.engine.is_paused:
                self._set(None)
                return
            if self._service.sessions.is_open:
                self._set(ttl_s)  # its end, or that of its lease, is waited for
                return
            try:
                if why is None:
                    self._service.resume_generation()
            except (LockstepError, WeightSyncError, ValueError) as error:
                why = error
            if why is not None:
                logger.error("the pause expired after %g s, but generation cannot continue: %s", ttl_s, why)
                self._set(ttl_s)  # try again: the obstacle may be gone then
            else:
                logger.warning("the pause expired after %g s (ttl): generation continues", ttl_s)
                self._set(None)


class Clients:
    """The clients of weight updates whose connection has closed. Any thread may call.

    A client gives its pause and its session a name of its own (`client`), and keeps a connection open meanwhile, by
    whose end the engine knows at once that it is gone.
    """

    def __init__(self, service: PauseVerbs) -> None:
        self._service = service
        self._gone: OrderedDict[str, None] = OrderedDict()

    def check(self, client: str | None) -> None:
        """Raise SessionError for a client that is gone: a call of its that was under way must not begin anything."""
        check_client(client)
        if client is not None and client in self._gone:
            raise SessionError(f"{client} is gone: its connection has closed")

    def leave(self, client: str) -> None:
        """Roll back the open session of a client whose connection has closed, and end its pause. Waits for a call of
        the session that runs. Does nothing for a client that has ended both."""
        self._gone[client] = None  # first: a pause that is about to begin finds it, or is found below
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        try:
            self._take_back(client)
            if self._service.end_pause_of(client).was_paused:
                logger.warning("%s is gone: the pause that it began is ended", client)
        except (LockstepError, WeightSyncError) as error:  # its leases end what is left
            logger.error("%s is gone, and its update could not be taken back: %s", client, error)

    def _take_back(self, client: str) -> None:
        while True:
            try:
                if self._service.sessions.settled_client() != client:
                    return
                with self._service.weights_turn("the end of a lost update"):
                    self._service.lose_weight_update(f"its client {client} is gone", client=client)
            except SessionBusy as busy:
                logger.warning("%s is gone, and a call of its update is not over: %s", client, busy)


class PauseVerbs(ABC):
    """The methods of a service that pause and continue. The subclass sets the fields."""

    engine: Engine
    sessions: WeightSessions
    pause_lease: PauseLease
    clients: Clients
    num_continued = 0  # calls that continue, also where nothing was paused

    def pause_generation(
        self,
        mode: PauseMode = "retract",
        *,
        ttl: float | None = None,
        keeps_other: bool = False,
        client: str | None = None,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PauseReport:
        """Pause the engine, see `Engine.pause_generation`. After `ttl` seconds generation continues by itself, so that
        a lost client leaves no engine paused; not in a weight-update session, whose begin and end start the time anew.
        Of updates without a session only the whole weights are committed then, a part of them is taken back.
        None: never.

        keeps_other: where generation is paused already, that pause keeps the time at which it ends, and its client.
        client: a name of the caller's own, for `continue_generation`. Raises ValueError for a ttl that is not positive,
        DeadlineExceeded as the engine does, SessionError for a client that is gone.
        """
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl must be positive, not {ttl}")
        with self.pause_lease.changing(ttl, timeout_s, keeps_other=keeps_other, client=client) as seconds_left:
            report = self.engine.pause_generation(mode, op_id=op_id, timeout_s=seconds_left)
        self.sessions.forget_abort()
        return report

    def continue_generation(
        self, *, client: str | None = None, op_id: str | None = None, timeout_s: float | None = None
    ) -> ContinueReport:
        """Commit an implicit session, then end the pause. client: end only the pause that this client has begun, also
        while another one's session is open, which holds the requests itself; do nothing where there is none.

        Raises SessionError while an explicit session is open, SamplingRefused where the weights cannot be sampled from.
        """
        if client is not None:
            if self.sessions.client == client:
                self._refuse_open_session()
            return self.end_pause_of(client, op_id=op_id, timeout_s=timeout_s)
        deadline = None if timeout_s is None else Deadline.within(timeout_s)
        self._refuse_open_session()
        self.commit_implicit_update(timeout_s=timeout_s)  # waits for an update: before the lease is held
        left = None if deadline is None else deadline.left_s
        with self.pause_lease.changing(timeout_s=left) as still_left:
            return self.resume_generation(op_id=op_id, timeout_s=still_left)

    def end_pause_of(self, client: str, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End the pause that this client has begun, if it has; an open session and weights that cannot be sampled from
        hold the requests themselves."""
        with self.pause_lease.ending(client, timeout_s) as is_its:
            if not (is_its and self.engine.is_controller):
                return ContinueReport(False, 0, 0)
            self.num_continued += 1
            return self.engine.continue_generation(op_id=op_id, timeout_s=timeout_s)

    def continue_in_turn(self, timeout_s: float | None = None, client: str | None = None) -> ContinueReport:
        """Wait for a turn where the module is a trainer's, and continue as `continue_generation` does. For calls from
        outside of the trainer's program."""
        deadline = None if timeout_s is None else Deadline.within(timeout_s)
        with self.turn_to_commit("continue_generation", timeout_s):
            return self.continue_generation(client=client, timeout_s=None if deadline is None else deadline.left_s)

    def resume_generation(self, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End the pause, and leave an implicit session and the pause's lease as they are. Raises as
        `continue_generation`."""
        self._refuse_open_session()
        if not self.engine.is_controller:  # on the other ranks the controller's generation continues
            return ContinueReport(False, 0, 0)
        if (why := self.engine.refusal) is not None:
            raise SamplingRefused(f"generation cannot continue: {why}")
        self.num_continued += 1
        return self.engine.continue_generation(op_id=op_id, timeout_s=timeout_s)

    @abstractmethod
    def commit_implicit_update(self, *, timeout_s: float | None = None) -> None:
        """Commit an implicit session, where one is open."""

    @abstractmethod
    def end_implicit_update(self, why: str) -> None:
        """Commit an implicit session of a client that is gone where it has written all weights, else roll it back."""

    @abstractmethod
    def lose_weight_update(self, why: str, only_expired: bool = False, *, client: str | None = None) -> None:
        """Roll back the open session of a client that is gone."""

    @abstractmethod
    def weights_turn(self, what: str, timeout_s: float | None = None) -> AbstractContextManager[float]:
        """Wait for a turn to write weights outside of the trainer."""

    @abstractmethod
    def turn_to_commit(self, what: str, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Wait for a turn in which an implicit session may be committed."""

    def _refuse_open_session(self) -> None:
        if self.sessions.is_open:
            raise SessionError("a weight-update session is open: end it or give it up before generation continues")
