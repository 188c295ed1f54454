"""The predicted time to prefill a prompt, learned from the steps that have run."""

from __future__ import annotations

from collections import deque

from ..sequences.step import ScheduleOutput

PRIOR_STEP_SECONDS = 0.010  # before the first measurement: a small model on a CPU, near enough to order requests by
PRIOR_ROW_SECONDS = 0.0001
_WINDOW = 31  # steps of each kind that are kept: one slow step changes no median, a new load is learned in sixteen


class PrefillTimePredictor:
    """Seconds of a prefill as num_steps * step_seconds + num_rows * row_seconds.

    step_seconds is the median over recent decode-only steps. row_seconds is the median, weighted by rows, of the time
    per prompt row that recent steps with prompt rows took beyond step_seconds. Both medians ignore outliers, such as a
    first step that compiles, as long as they are fewer than half.
    """

    def __init__(self, max_rows_per_step: int) -> None:
        self._max_rows = max_rows_per_step
        self._decode_steps: deque[float] = deque(maxlen=_WINDOW)  # seconds
        self._prefill_steps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # (prompt rows, seconds)
        self._step_seconds: float | None = None  # medians of the newest steps; None: not computed since
        self._row_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, apart from its prompt rows.

        Before the first decode-only step it is 0 if prompt rows were measured, whose time then covers the whole step;
        else the prior.
        """
        if not self._decode_steps:
            return 0.0 if self._prefill_steps else PRIOR_STEP_SECONDS
        if self._step_seconds is None:
            self._step_seconds = sorted(self._decode_steps)[len(self._decode_steps) // 2]
        return self._step_seconds

    @property
    def row_seconds(self) -> float:
        """Seconds of one prompt row; the prior before the first measurement."""
        if not self._prefill_steps:
            return PRIOR_ROW_SECONDS
        if self._row_seconds is None:
            self._row_seconds = self._median_row_seconds()
        return self._row_seconds

    def observe(self, output: ScheduleOutput, seconds: float) -> None:
        """Learn from a step that ran. Rows of a sequence with more than one row in the step count as a prompt's."""
        num_rows = 0
        if output.num_rows > len(output.scheduled):
            num_rows = sum(item.num_tokens for item in output.scheduled if item.num_tokens > 1)
        if num_rows:
            self._prefill_steps.append((num_rows, seconds))
        elif output.scheduled:
            self._decode_steps.append(seconds)
        self._step_seconds = self._row_seconds = None  # computed when a prediction needs them, not at every step

    def predict(self, num_tokens: int) -> float:
        """Predict the seconds of `num_tokens` prompt rows when no other prompt is in their steps; 0.0 for none."""
        num_steps = -(-num_tokens // self._max_rows)
        return num_steps * self.step_seconds + num_tokens * self.row_seconds

    def _median_row_seconds(self) -> float:
        rates = sorted((max(seconds - self.step_seconds, 0.0) / rows, rows) for rows, seconds in self._prefill_steps)
        half = sum(rows for _, rows in rates) / 2
        for rate, rows in rates:
            half -= rows
            if half <= 0:
                return rate
        raise AssertionError("the rows of all steps are more than half of them")
