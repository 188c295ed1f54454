"""Control commands: values with an id, a deadline and a reply, which run between two steps.

A command runs once or never: a command whose deadline passed before it began never runs later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..errors import DeadlineExceeded

PauseMode = Literal["abort", "retract", "in_place"]
OnCommit = Literal["verify"]  # what a commit does with sequences that have begun; None: they go on as they are


@dataclass(frozen=True)
class PauseReport:
    """The result of a pause, which holds when the call returns."""

    mode: PauseMode
    num_running: int  # sequences that hold blocks now
    num_waiting: int  # sequences that wait now, retracted ones included
    num_retracted: int  # by this call
    num_aborted: int  # by this call


@dataclass(frozen=True)
class ContinueReport:
    """The result of the end of a pause."""

    was_paused: bool
    num_running: int
    num_waiting: int


@dataclass(frozen=True)
class AbortReport:
    """Ids of the aborted sequences, and ids from the call that are not live."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class FlushReport:
    """The result of a flush: whether it happened, the number of freed blocks, or the reason against it."""

    success: bool
    flushed_items: int
    error_msg: str
    num_unpinned: int = 0  # pinned blocks among them: no pin survives a flush


@dataclass(frozen=True)
class CommitReport:
    """The effect of new weights on the cache."""

    num_blocks_dropped: int  # cached KV of the version before
    num_unpinned: int  # pinned blocks among them: no pin survives a commit
    lifted: Mapping[str, str] = field(default_factory=dict)  # refusals to sample that ended, by key
    num_verified: int = 0  # sequences that begin again, with their tokens as a draft


@dataclass(frozen=True)
class HoldReport:
    """The requests at the start of a weight update."""

    num_aborted: int  # by the update
    num_running: int  # sequences that hold blocks and go on with the new weights
    num_waiting: int


@dataclass(frozen=True)
class EvictReport:
    """The numbers of freed and remaining blocks below a block."""

    is_known: bool  # False: no cached block has that hash
    num_evicted: int
    num_held: int  # blocks below it that running sequences hold
    num_pinned: int  # blocks below it that pins protect and no sequence holds


def check_pause(mode: str) -> None:
    """Check the mode of a pause. Raises ValueError naming the allowed modes."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, not {mode!r}")


def check_in_flight(in_flight: str | None, *, abort_all: bool, keep_running: bool) -> None:
    """Check what a commit is to do with sequences that have begun. Raises ValueError."""
    if in_flight not in (None, *get_args(OnCommit)):
        raise ValueError(f'in_flight must be "verify" or None, not {in_flight!r}')
    others = [name for name, given in (("abort_all_requests", abort_all), ("keep_running", keep_running)) if given]
    if in_flight is not None and others:
        raise ValueError(f"in_flight={in_flight!r} and {' and '.join(others)} exclude each other")


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError unless a thread can wait for so many seconds."""
    if not 0 < timeout_s < threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s must be positive, and below {threading.TIMEOUT_MAX:.0f}, not {timeout_s}")


@dataclass(eq=False)
class Command:
    """One call that runs between two steps."""

    name: str
    run: Callable[[], Any]
    reply: Future[Any]
    timeout_s: float | None = None
    deadline: float | None = field(init=False)  # of time.monotonic()
    _begun: threading.Lock = field(default_factory=threading.Lock)  # taken once: by execute or by give_up

    def __post_init__(self) -> None:
        self.deadline = None if self.timeout_s is None else time.monotonic() + self.timeout_s

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, never negative; None without a deadline."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def execute(self) -> None:
        """Run the call and set the reply, unless it was given up or its deadline has passed."""
        if not self._begun.acquire(blocking=False):
            return
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.reply.set_exception(self.too_late())
            return
        self.reply.set_running_or_notify_cancel()  # calls of the same id wait for its end from now on
        try:
            self.reply.set_result(self.run())
        except Exception as error:  # noqa: BLE001 - a thread boundary: the caller that waits for the reply gets it
            self.reply.set_exception(error)

    def give_up(self) -> None:
        """Give the call up after its deadline, unless it has begun: the reply is DeadlineExceeded."""
        if self._begun.acquire(blocking=False):
            self.reply.set_exception(self.too_late())

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name} did not begin within {self.timeout_s} s and will not run")
