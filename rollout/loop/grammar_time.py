"""Limits on the processor time of grammars: for a token of one sequence, and for all sequences of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..grammars.matcher import MAX_TOKEN_S
from ..grammars.processor_time import thread_time
from ..sequences.request import Request

MAX_STEP_S = 1.0  # of processor time for the grammars of one step
HURRIED_S = 0.02  # for a token, once those of its step have taken so long


class GrammarTime:
    """Measure the time of each sequence's grammar in a step, and name the sequences that take too long."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # processor time of each sequence's grammar since the last step
        self._spent_s = 0.0  # the sum of them
        self._num_long: dict[str, int] = {}  # tokens of each sequence that took too long

    @property
    def is_spent(self) -> bool:
        """Whether the grammars of this step have taken all of its time."""
        return self._spent_s > MAX_STEP_S

    @contextmanager
    def charged(self, request: Request) -> Iterator[None]:
        """Charge the thread's processor time to a constrained sequence. Its next tokens get less, the more the step's
        grammars have taken so far."""
        assert request.grammar is not None
        request.grammar.limit(HURRIED_S if self.is_spent else MAX_TOKEN_S)
        began = thread_time()
        try:
            yield
        finally:
            seconds = thread_time() - began
            self._seconds[request.id] = self._seconds.get(request.id, 0.0) + seconds
            self._spent_s += seconds

    def forget_step(self) -> None:
        """Forget the time of a step that has failed, which the next one does not have to answer for."""
        self._seconds.clear()
        self._spent_s = 0.0

    def end_step(self, ids: Iterable[str], max_others: int) -> list[tuple[str, float, int]]:
        """End the step of these sequences. Returns id, seconds, and if this is too long how many tokens of the sequence
        were so far, else 0; the slowest first.

        Where all together took too long, so did the slowest. max_others: the most sequences that may be between two of
        their steps. What a token of an ambiguous grammar costs grows with the text, so the step before a very long one
        is long too.
        """
        slowest = sorted(((self._seconds.pop(id, 0.0), id) for id in ids), reverse=True)
        total = sum(seconds for seconds, _ in slowest)
        for kept in (self._seconds, self._num_long):
            if len(kept) > max_others:  # of sequences that have ended otherwise
                kept.clear()
        self._spent_s = 0.0
        found = []
        for seconds, id in slowest:
            num_long = 0
            if total > MAX_STEP_S or seconds > MAX_TOKEN_S:
                num_long = self._num_long[id] = self._num_long.get(id, 0) + 1
                total -= seconds
            found.append((id, seconds, num_long))
        return found
