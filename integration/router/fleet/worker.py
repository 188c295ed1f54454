"""One worker of a router: its health, its weights, its load, and the reasons for which it gets no requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

from .served import Weights


class Health(Enum):
    """The health of a worker by its probes."""

    UNSEEN = "unseen"  # no process has answered at its address yet
    STARTING = "starting"  # a new process answers there, and is not healthy yet
    ALIVE = "alive"
    DRAINING = "draining"  # it finishes its open requests, takes no new ones, and ends
    DEAD = "dead"  # it was healthy, and is not


class Hold(Enum):
    """A reason for which an enabled worker gets no requests."""

    BROADCAST = "broadcast"  # a pause, an update or a group call is in progress
    GROUP = "group"  # it did not join a group: until it joins one, the group is destroyed, or an operator enables it
    JOURNAL = "journal"  # an update failed: until an operator resolves it
    PAUSE = "pause"  # it came while the fleet is paused: until it goes on, or an operator enables it
    VERSION = "version"  # it returned with other weights than the rest: until they are the same


@dataclass(eq=False)
class Worker:
    """One engine behind HTTP. The registry, the health checks and the administration change it, on the event loop."""

    url: str
    id: str  # the same for the same URL, also after the router restarts
    disabled: bool = False  # by an operator
    holds: dict[Hold, str] = field(default_factory=dict)  # each with an explanation
    not_joined: dict[str, str] = field(default_factory=dict)  # groups that others have joined, each with the reason
    health: Health = Health.UNSEEN
    paused: bool = False  # its engine is paused: requests sent there would wait
    num_running: int = 0  # running sequences that this router sent
    num_routed: int = 0  # sequences that this router has sent so far
    num_failed_probes: int = 0
    num_deaths: int = 0
    registration: int = 0  # number of workers that were added before it, another one at the same URL too
    last_error: str | None = None
    weight_version: str | None = None  # as last read
    weight_digest: str | None = None  # as last read; None: not read since the version changed, or none is reported
    guarantee: dict[str, object] | None = None  # on which its bits depend; None: not reported
    weights_at_return: Weights | None = None  # with which its process came, if it was held for them
    num_ranks: int = 1  # ranks of its tensor and pipeline parallel mesh, which join a group
    startup_time: object = None  # differs between two processes at the same address
    died: asyncio.Event = field(default_factory=asyncio.Event)  # replaced when it returns
    drains: asyncio.Event = field(default_factory=asyncio.Event)  # likewise
    is_gone: bool = True  # nothing has listened at its address since it was healthy: the next process is a new one
    is_suspect: bool = False  # a call to it failed: another process may have its address now
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def port(self) -> int:
        """The port at which it listens."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_alive(self) -> bool:
        """Whether its last probe succeeded, or too few have failed since; True also while it drains."""
        return self.health in (Health.ALIVE, Health.DRAINING)

    @property
    def is_draining(self) -> bool:
        """Whether it finishes its open requests and takes no new ones."""
        return self.health is Health.DRAINING

    @property
    def can_take_requests(self) -> bool:
        """Whether it is alive, not draining, enabled and without holds."""
        return self.health is Health.ALIVE and not self.disabled and not self.holds

    @property
    def needs_operator(self) -> bool:
        """Whether an operator has disabled it, or has to end one of its holds."""
        return self.disabled or Hold.GROUP in self.holds or Hold.JOURNAL in self.holds

    @property
    def is_known(self) -> bool:
        """Whether it is alive and its last probe has read all that it reports of its weights and its bits."""
        is_named = self.guarantee is None or self.weight_digest is not None
        return self.is_alive and not self.is_suspect and is_named

    @property
    def weights(self) -> Weights | None:
        """The names of its weights, as last read; None where it reports no version."""
        return None if self.weight_version is None else Weights(self.weight_version, self.weight_digest)

    @property
    def life(self) -> tuple[int, int]:
        """The names of its process at this router: others after a death, and after a removal, behind which the process
        may have ended unseen."""
        return self.registration, self.num_deaths

    @property
    def process(self) -> float | str | None:
        """The start of its process, which no other process at its address has; None: it reports none."""
        return self.startup_time if isinstance(self.startup_time, float | int | str) else None

    @contextmanager
    def running(self, num_sequences: int) -> Iterator[None]:
        """Count sequences as running inside the block."""
        self.num_running += num_sequences
        self.num_routed += num_sequences
        try:
            yield
        finally:
            self.num_running -= num_sequences

    def suspect(self, why: str) -> None:
        """Note an error, and ask for a probe at once."""
        self.last_error = why
        self.is_suspect = True
        self.check_now.set()

    def forget_weights(self) -> None:
        """Note that its weights are not those that its last probe saw, and ask for a probe at once."""
        self.weight_digest, self.is_suspect = None, True
        self.check_now.set()

    def report(self) -> dict[str, object]:
        """Return its entry of /workers. Changes nothing."""
        return {
            "id": self.id,
            "url": self.url,
            "status": self.health.value,
            "is_healthy": self.health is Health.ALIVE,
            "disabled": self.disabled,
            "held": {hold.value: why for hold, why in self.holds.items()},
            "routable": self.can_take_requests,
            "paused": self.paused,
            "load": self.num_running,
            "num_routed": self.num_routed,
            "num_deaths": self.num_deaths,
            "num_ranks": self.num_ranks,
            "weight_version": self.weight_version,
            "weight_digest": self.weight_digest,
            "last_error": self.last_error,
        }
