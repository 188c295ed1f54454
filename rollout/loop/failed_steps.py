"""The rest after a step that failed, so that others do not suffer for a few requests.

Its sequences wait again. Where memory ran out, later steps are smaller; where logits are broken, the requests that have
them are aborted, and the calls that wait for these hear of it, or else the caller that runs the step. Every other error
is that caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..completion import FinishReason
from ..errors import BrokenLogits
from ..model.memory import is_out_of_memory
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput
from .parts import Parts

logger = logging.getLogger(__name__)

_FEW_ROWS = 16  # of one sequence: a step that finds no memory for these finds none for fewer


class FailedSteps:
    """Remember why a step failed, and end what cannot go on."""

    def __init__(
        self,
        parts: Parts,
        abort: Callable[[Request, FinishReason], None],
        on_broken: Callable[[BrokenLogits, Sequence[str]], Sequence[str]],
    ) -> None:
        """Create it. abort: ends a live request, with no step in flight; on_broken: as that of `Answers`."""
        self.has_thread: Callable[[], bool] = lambda: False  # whether the engine's own thread runs the steps, no caller
        self._limit, self._engine = parts.scheduler.row_limit, parts.managers.engine
        self._abort, self._on_broken = abort, on_broken
        self._too_large: ScheduleOutput | None = None  # the step whose memory was not found

    def on_failure(self, output: ScheduleOutput, error: BaseException) -> None:
        """Note the step that failed. Its sequences wait again now."""
        if isinstance(error, RuntimeError | MemoryError):
            self._too_large = output if is_out_of_memory(error) else None

    def go_on_after(self, error: RuntimeError | MemoryError, *, in_step: bool = True) -> None:
        """Make it possible to go on after the error of a step, or raise it.

        in_step: whether a caller asked for the step, and not for something that waits for its end.
        """
        output, self._too_large = self._too_large, None
        if output is not None:
            self._go_on_without_memory(output, error)
        elif isinstance(error, BrokenLogits) and error.ids:
            live = [id for id in dict.fromkeys(error.ids) if id in self._engine]
            has_thread = self.has_thread()
            heard = live if has_thread else self._on_broken(error, live)
            is_raised = in_step and not has_thread and (not live or len(heard) < len(live))  # to the step's caller
            self._end_broken(error, heard if is_raised else live)
            if is_raised:
                raise error
        else:
            raise error

    def _end_broken(self, error: BrokenLogits, ids: Sequence[str]) -> None:
        if ids:
            logger.error("%s: they are aborted", error)
        for id in filter(self._engine.__contains__, ids):
            self._abort(self._engine.request(id), FinishReason("abort", message=str(error), by_engine=True))

    def _go_on_without_memory(self, output: ScheduleOutput, error: RuntimeError | MemoryError) -> None:
        """Make later steps smaller after one that did not find its memory, so that no other request is lost.

        A request whose sequence finds none for a few rows alone is aborted.
        """
        text, why = f"{type(error).__name__}: {error}".splitlines()[0][:500], ""
        # More rows than the limit are those of one image, which do not become fewer.
        if len(output.scheduled) > 1 or _FEW_ROWS < output.num_rows <= self._limit.now:
            self._limit.halve(output.num_rows)
        elif self._limit.now > _FEW_ROWS:  # try once more
            self._limit.halve(2 * _FEW_ROWS)
        elif (id := output.scheduled[0].id) in self._engine:
            why = f"out of memory: a step of {output.num_rows} rows of this request alone found none ({text})"
            self._abort(self._engine.request(id), FinishReason("abort", message=why, by_engine=True))
        logger.error(
            "memory ran out in a step of %d rows of %d sequences; steps have at most %d rows for now%s: %s",
            output.num_rows, len(output.scheduled), self._limit.now,
            ", and its request is aborted" if why else "", text,
        )  # fmt: skip
