"""What the loop asks of whoever runs its steps: one rank, or a replica whose stages hold a share of the layers each.

A launched step is a flight. It passes the stages one after another, and several flights may be in the air, one stage
each. Two rules that everything above relies on:

- Every stage runs the flights in the order of their launches. So whatever an earlier flight still reads or writes of a
  KV block happens, on every stage, before a later flight writes to it: a block may change hands between two launches.
- The managers know a step before it is launched: `launch` comes after `on_schedule`, so a runner that sends what the
  managers were told since its last launch keeps other ranks equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..sequences.event_log import Event
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from ..sequences.worker_manager import WorkerSequenceManager


class StepHandle(Protocol):
    """A step that was launched."""

    def wait_first_stage(self) -> None:
        """Return once the step's rows have left the first stage. The loop asks after each launch, before it schedules
        again, where there is more than one stage. Raises what failed."""
        ...

    def results(self) -> list[SequenceResult]:
        """Wait for the last stage. One result per scheduled sequence, in the order of the schedule.

        Called at most once, and in the order of the launches. Raises what failed.
        """
        ...

    def abandon(self) -> None:
        """Nobody will ask for the results: drop them when they come. Returns at once and raises nothing.

        The step may run on: flights that are launched later come after it on every stage.
        """
        ...


class Runner(Protocol):
    """Runs steps, in the order in which they are launched. One thread at a time calls it."""

    num_stages: int  # as many flights may be in the air
    workers: WorkerSequenceManager  # this rank's: whoever drives the runner tells it every event, as the controller's
    num_forwards: int  # launched or run on this rank since it was last set to 0

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        """The callback of every event, called before the managers; None: the runner needs no events."""
        ...

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> StepHandle:
        """Give a step with rows to the first stage; `requests` holds those it runs, by id.

        May run the first stage before it returns. When it raises, or a handle does, the loop abandons all flights and
        everybody in them waits again: the step may have run in part, and no result of it will be taken.
        """
        ...

    def anticipate(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> None:
        """With one stage, and a step in the air: this one will probably be launched next, less those that end. It may
        be begun; the managers do not know it yet."""
        ...

    def settle(self) -> None:
        """What was anticipated and not launched is not wanted: drop it, and return once it touches nothing."""
        ...

    def forget(self, request: Request) -> None:
        """The request was answered: drop what is kept for it. Comes after its last results, or beside those that
        nobody will take."""
        ...

    def close(self) -> None:
        """End what it runs on. Nothing is in flight."""
        ...
