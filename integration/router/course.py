"""A generation request, and its course from worker to worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from .calls import WorkerCall
from .fleet.aborted import Since
from .fleet.worker import Worker
from .moving.progress import Progress
from .relay import Relay
from .sessions import Opening


@dataclass(frozen=True)
class Generation:
    """A call with the values that determine the choice of its worker."""

    call: WorkerCall
    keys: tuple[bytes, ...]  # keys of its prompt, see `balance.prompt_keys`
    num_sequences: int
    session: str | None = None  # that lives on one worker, see `sessions`
    progress: Progress | None = None  # of its stream, if it may go on elsewhere
    opens: Opening | None = None  # the session that it opens

    @property
    def may_be_sent_twice(self) -> bool:
        """Whether two workers may have it at the same time: it has a seed, and changes nothing but caches."""
        return self.session is None and self.opens is None

    def call_at(self, worker: Worker) -> WorkerCall:
        """Return the call as it is sent to a worker that begins with it."""
        return self.call if self.opens is None else replace(self.call, body=self.opens.body_at(worker))


@dataclass
class Course:
    """The course of one request so far."""

    deadline: float  # time.monotonic
    aborts: Since  # since it began
    failures: list[tuple[str, str]] = field(default_factory=list)  # URL and reason of each attempt that failed
    num_sent: int = 0  # times that it was sent to a worker
    waited_s: float = 0.0  # for a worker
    full: dict[str, tuple[float, str]] = field(default_factory=dict)  # by URL: until when (time.monotonic), and why
    relay: Relay | None = None  # of the newest attempt
    num_notes: int = 0  # of the events that the client had when the newest attempt failed

    @property
    def has_begun(self) -> bool:
        """Whether the client has a part of the answer."""
        return self.relay is not None and self.relay.has_begun

    def failed(self, worker: Worker, why: str, progress: Progress | None) -> None:
        """Note that an attempt failed. One that brought the client further events is the first to count."""
        if progress is not None and progress.num_notes > self.num_notes:
            self.num_notes = progress.num_notes
            self.failures.clear()
        self.failures.append((worker.url, why))

    def is_full(self, worker: Worker) -> bool:
        """Return whether this worker has refused the request because it is full, and wants to be left alone still."""
        return self.full.get(worker.url, (0.0, ""))[0] > time.monotonic()
