"""The interface between the loop and the runner of its steps: one rank, or a replica with a share of the layers per
stage.

A launched step passes the stages one after another. Several steps may be in flight, one on each stage. The rooms above
rely on two rules:

- Every stage runs the steps in the order of their launches. An earlier step therefore finishes its reads and writes of
  a KV block, on every stage, before a later step writes to it: a block may change its owner between two launches.
- The managers know a step before it is launched: `launch` comes after `on_schedule`. A runner that sends all events
  since its last launch therefore keeps the other ranks' managers equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from ..sequences.event_log import Event
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from ..sequences.worker_manager import WorkerSequenceManager

T = TypeVar("T")


class StepHandle(Protocol):
    """The interface of a launched step."""

    def wait_first_stage(self) -> None:
        """Return once the step's rows have left the first stage. Raises the error of a step that failed.

        With more than one stage, the loop calls it after each launch, before it schedules again.
        """
        ...

    def results(self) -> list[SequenceResult]:
        """Wait for the last stage and return one result per scheduled sequence, in the order of the schedule.

        Called at most once, and in the order of the launches. Raises the error of a step that failed.
        """
        ...

    def abandon(self) -> None:
        """Give up the results: they are dropped when they arrive. Returns at once and raises nothing.

        The step may run on: steps that are launched later come after it on every stage.
        """
        ...


class Runner(Protocol):
    """The interface of a runner: it runs steps in the order of their launches. One thread at a time calls it."""

    num_stages: int  # the largest number of steps in flight
    workers: WorkerSequenceManager  # this rank's; the caller passes it every event, as it does the controller's manager
    begins_ahead: bool  # whether an announced step may begin; a step that may have drafts is not announced
    num_forwards: int  # launched or run on this rank since it was last set to 0
    goes_on: Callable[[int], bool]  # asked after so many steps of one schedule whether the next one may run

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        """Called with every event before the managers get it; None: not needed."""

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> StepHandle:
        """Give a step with rows to the first stage. `requests` holds the requests that it runs, by id.

        May run the first stage before it returns. When it or a handle raises, the loop abandons all steps in flight and
        their sequences wait again: the step may have run in part, and none of its results is used.
        """
        ...

    def anticipate(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> None:
        """Announce the step that will probably be launched next, without the sequences that end before. It may begin.

        Called with one stage and a step in flight. The managers do not know the announced step yet.
        """
        ...

    def settle(self) -> None:
        """Cancel the anticipated step unless it was launched. Returns when it no longer reads or writes KV."""
        ...

    def release_memory(self) -> None:
        """Drop recorded steps, and what they keep of the weights and of KV, before these are released. No step is in
        flight."""
        ...

    def runs_several(self, num_rows: int) -> bool:
        """Return whether it runs the further steps of a schedule with `num_steps` > 1, of so many rows each."""
        ...

    def computed_rows(self, num_rows: int) -> int:
        """Return the rows that a step of so many decode rows computes: more where it is padded to a recorded size."""
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of an answered request. Called after its last results, or while abandoned steps still run."""
        ...

    def call(self, run: Callable[[], T]) -> T:
        """Return `run()`, called in the thread that runs the model; the runner's own, or that of this call. No step is
        in flight."""
        ...

    def close(self) -> None:
        """Stop the runner's threads. No step is in flight."""
        ...
