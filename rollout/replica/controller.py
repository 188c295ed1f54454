"""The controller's runner in a replica of several ranks. The followers execute its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..ranks.channel import RankChannel
from ..ranks.controller_channel import as_controller
from ..ranks.remote_errors import error_from
from ..ranks.wire import Kind
from ..reports.metrics import Metrics
from ..sequences.event_log import Event
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from .event_stream import EventWriter
from .result_bytes import results_from
from .stage import Stage

T = TypeVar("T")


class ReplicaRunner:
    """The runner of a replica. It sends each step once to the followers, with the managers' events since the step
    before, and runs the controller's own share."""

    begins_ahead = False

    def __init__(self, ranks: RankChannel, stage: Stage, metrics: Metrics, state_check_steps: int) -> None:
        self.num_stages = ranks.mesh.pp
        self.workers = stage.workers
        self.stage = stage
        self._ranks, self._metrics = ranks, metrics
        self._check_every = state_check_steps
        self._num_launched = 0
        self.goes_on: Callable[[int], bool] = lambda num_steps: False
        self._writer = EventWriter(stage.has_states)
        self._new: dict[str, Request] = {}  # not sent to the followers yet
        self.sampling_rank = ranks.mesh.num_ranks - ranks.mesh.tp  # local

    @property
    def num_forwards(self) -> int:
        return self.stage.num_forwards

    @num_forwards.setter
    def num_forwards(self, value: int) -> None:
        self.stage.num_forwards = value

    def on_event(self, event: Event) -> None:
        """Queue an event for the followers' next message. Called before the controller's managers get it."""
        began = time.perf_counter()
        name, args = event
        if name == "add":
            self._new[args[0].id] = args[0]
        elif name == "on_schedule":
            self._writer.schedule(args[0], self.workers, self._new)
            for item in args[0].scheduled:
                self._new.pop(item.id, None)
        elif name == "on_step_completed":
            self._writer.results(args[0])
        elif name == "on_step_cancelled":
            self._writer.cancelled(args[0])
        elif name == "preempt":
            self._writer.preempt(args[0])
        elif name == "free":
            self._new.pop(args[0], None)
            if args[0] in self._writer:
                self._writer.free(args[0])
        self._metrics.control_seconds += time.perf_counter() - began

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> ReplicaStep:
        """Send the step to the followers and run the first stage here."""
        ranks = as_controller(self._ranks)
        ranks.await_followers(ranks.timeout_s)
        began = time.perf_counter()
        self._num_launched += 1
        if self._num_launched % self._check_every == 0:
            self._writer.check(self.workers.state_hash())
        self._writer.run(output.step)
        self._send(output.step)
        self._metrics.control_seconds += time.perf_counter() - began
        own = self.stage.run(output, requests)
        ranks.watch.enter("waiting for results")
        return ReplicaStep(self, output, own)

    def check_states(self) -> None:
        """Ask the followers, if they follow, to compare their state with the controller's now. Returns at once."""
        if len(as_controller(self._ranks).present) == self._ranks.mesh.num_ranks - 1:
            self._writer.check(self.workers.state_hash())
            self._send(0)

    def anticipate(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> None:
        """Do nothing: followers run launched steps only."""

    def settle(self) -> None:
        """Do nothing: no step begins before its launch."""

    def release_memory(self) -> None:
        """Drop this rank's recorded steps; followers drop theirs where they release memory."""
        self.stage.release_memory()

    def runs_several(self, num_rows: int) -> bool:
        """Return False: each step is sent to the followers."""
        return False

    def computed_rows(self, num_rows: int) -> int:
        return self.stage.computed_rows(num_rows)

    def forget(self, request: Request) -> None:
        self.stage.forget(request)

    def call(self, run: Callable[[], T]) -> T:
        """Return `run()`: the caller's thread runs this rank's share of the model."""
        return run()

    def close(self) -> None:
        """Do nothing: the runner has no threads."""

    def results(self, output: ScheduleOutput) -> list[SequenceResult]:
        """Wait for the sampling rank's results. Raises the error of a rank where the step failed, and RankFailure."""
        message = as_controller(self._ranks).await_step(output.step, self.sampling_rank)
        began = time.perf_counter()
        if message.kind is Kind.STEP_FAILED:
            rank, _, text = message.payload.partition(b"\n")
            raise error_from(text, self._ranks.watch.describe(int(rank)))
        results = results_from(message.payload, output.scheduled)
        self._metrics.control_seconds += time.perf_counter() - began
        return results

    def abandon(self, output: ScheduleOutput) -> None:
        as_controller(self._ranks).abandon_step(output.step)

    def _send(self, step: int) -> None:
        self._ranks.send(Kind.STEP, step, self._writer.take())
        self._metrics.control_bytes = self._ranks.num_bytes_sent
        self._metrics.control_messages = self._ranks.num_messages_sent


@dataclass(frozen=True)
class ReplicaStep:
    """A launched step that passes through the stages."""

    runner: ReplicaRunner
    output: ScheduleOutput
    own: list[SequenceResult]  # if the controller samples itself

    def wait_first_stage(self) -> None:
        """Return at once: `launch` has run the first stage."""

    def results(self) -> list[SequenceResult]:
        return self.own if self.runner.sampling_rank == 0 else self.runner.results(self.output)

    def abandon(self) -> None:
        if self.runner.sampling_rank != 0:
            self.runner.abandon(self.output)
