"""The managers' event stream, recorded and replayed: equal events give equal state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ..completion import FinishReason
from .engine_manager import EngineSequenceManager
from .manager import SequenceManager
from .request import Request
from .sequence import Sequence
from .step import ScheduledSequence, ScheduleOutput, SequenceResult

Event = tuple[str, tuple[Any, ...]]  # the manager's method, its arguments


class ManagerPair:
    """The controller's manager and this rank's. Every event goes to both, and to the log if there is one."""

    def __init__(
        self,
        engine: EngineSequenceManager,
        worker: SequenceManager,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Join two managers without a log. on_event: called with every event before the managers get it."""
        self.engine, self.worker = engine, worker
        self.log: list[Event] | None = None
        self._on_event = on_event

    def add(self, request: Request) -> None:
        if self._is_recording:  # thousands may arrive at once: they are not copied for nothing
            self._record("add", fresh_copy(request))
        self.engine.add(request)

    def on_schedule(self, output: ScheduleOutput) -> None:
        if self.log is not None or self._on_event is not None:
            self._record("on_schedule", output)
        self.engine.on_schedule(output)
        self.worker.on_schedule(output)

    def on_stage_completed(self, items: tuple[ScheduledSequence, ...]) -> None:
        """Report rows that went through the controller's stage. Ranks of other stages count their own rows."""
        self._record("on_stage_completed", items)
        self.engine.on_stage_completed(items)
        self.worker.on_stage_completed(items)

    def on_step_completed(self, results: list[SequenceResult]) -> list[str]:
        if self.log is not None or self._on_event is not None:
            self._record("on_step_completed", results)
        finished = self.engine.on_step_completed(results)
        self.worker.on_step_completed(results)
        return finished

    def on_step_cancelled(self, items: tuple[ScheduledSequence, ...]) -> None:
        self._record("on_step_cancelled", items)
        self.engine.on_step_cancelled(items)
        self.worker.on_step_cancelled(items)

    def deliver(self, request: Request) -> None:
        """Decode the newest tokens at the controller. The end of a sequence by its text is an event."""
        was_live = request.finish_reason is None
        if self.engine.deliver(request) and was_live:
            self._record("finish", request.id, request.finish_reason)

    def preempt(self, id: str) -> None:
        self._record("preempt", id)
        self.engine.preempt(id)
        if id in self.worker:
            self.worker.preempt(id)

    def finish(self, id: str, reason: FinishReason) -> None:
        self._record("finish", id, reason)
        self.engine.finish(id, reason)

    def free(self, id: str) -> None:
        self._record("free", id)
        self.engine.free(id)
        if id in self.worker:
            self.worker.free(id)

    @property
    def _is_recording(self) -> bool:
        return self.log is not None or self._on_event is not None

    def _record(self, name: str, *args: object) -> None:
        if self.log is not None:
            self.log.append((name, args))
        if self._on_event is not None:
            self._on_event((name, args))


def fresh_copy(request: Request) -> Request:
    """Copy the request as it was when it arrived. The copy shares no mutable state and has no detokenizer."""
    prompt = request.sequence.token_ids[: request.sequence.num_prompt_tokens]
    return replace(request, sequence=Sequence(request.id, prompt), detokenizer=None, grammar=None)


def replay(events: Iterable[Event], manager: SequenceManager) -> None:
    """Apply a log to a fresh manager of either kind. A worker's manager takes the events of its sequences only."""
    engine = manager if isinstance(manager, EngineSequenceManager) else None
    for name, args in events:
        if name == "add":
            if engine is not None:
                engine.add(fresh_copy(args[0]))
        elif name == "finish":
            if engine is not None:
                engine.finish(*args)
        elif engine is not None or name.startswith("on_") or args[0] in manager:
            getattr(manager, name)(*args)
