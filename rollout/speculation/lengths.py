"""The choice of the drafts' lengths in a step: as many rows as bring the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .step_costs import StepCosts

FIRST_GAIN = 1.03  # of tokens a second, assumed of drafts that were not tried lately
MIN_GAIN = 1.05  # of tokens a second: below this, measured times are not exact enough
NEW_SIZE_GAIN = 1.1  # of tokens a second, by a size that never ran: its first steps compile, record or try something


class StepSize(NamedTuple):
    """The size of a step without drafts."""

    num_rows: int
    num_tokens: int  # that it samples


class Lengths(Protocol):
    """The interface of a rule for the lengths of drafts."""

    def may_draft(self, size: StepSize) -> bool:
        """Return whether enough is known to choose. size: of the step without drafts."""
        ...

    def choose(self, size: StepSize, chances: Sequence[Sequence[float]], budget: int) -> list[int]:
        """Return how many tokens of each proposal to take.

        size: of the step without drafts. chances: by proposal, of each of its tokens to be accepted with all before it.
        budget: the most tokens of all proposals together.
        """
        ...

    def gain(self, size: StepSize, num_rows: int, num_accepted: float, planning_s: float) -> float:
        """Return how many times as many tokens a second a step brought as one without drafts would have.

        size: without drafts; num_rows: with them; planning_s: the time to find and place them, in seconds.
        """
        ...


class WholeDrafts:
    """A rule that takes all that is proposed while there is room, whatever it costs: for tests of equality."""

    def may_draft(self, size: StepSize) -> bool:
        return True

    def choose(self, size: StepSize, chances: Sequence[Sequence[float]], budget: int) -> list[int]:
        lengths = []
        for proposal in chances:
            lengths.append(min(len(proposal), budget))
            budget -= lengths[-1]
        return lengths

    def gain(self, size: StepSize, num_rows: int, num_accepted: float, planning_s: float) -> float:
        return FIRST_GAIN


class BestRate:
    """A rule that takes the likeliest tokens, as many as give the most expected tokens per predicted second."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs

    def may_draft(self, size: StepSize) -> bool:
        return self._costs.knows(size.num_rows)

    def choose(self, size: StepSize, chances: Sequence[Sequence[float]], budget: int) -> list[int]:
        # The chances of a proposal never grow with depth, so the likeliest tokens of all are beginnings of proposals.
        tokens = [(chance, -depth, index) for index, its in enumerate(chances) for depth, chance in enumerate(its)]
        ranked = sorted(tokens, reverse=True)[:budget]
        expected, num_taken, predict = float(size.num_tokens), 0, self._costs.seconds
        most = expected + sum([chance for chance, _, _ in ranked])
        best = MIN_GAIN * expected / predict(size.num_rows)
        for num, (chance, _, _) in enumerate(ranked, 1):
            expected += chance
            rows = size.num_rows + num
            seconds = predict(rows)
            if (rate := expected / seconds) > best and (rate > NEW_SIZE_GAIN * best or self._costs.has_run(rows)):
                best, num_taken = rate, num
            elif most <= best * seconds:  # and seconds never fall
                break
        lengths = [0] * len(chances)
        for _, _, index in ranked[:num_taken]:
            lengths[index] += 1
        return lengths

    def gain(self, size: StepSize, num_rows: int, num_accepted: float, planning_s: float) -> float:
        seconds = self._costs.seconds(num_rows) + planning_s
        return (size.num_tokens + num_accepted) / size.num_tokens * self._costs.seconds(size.num_rows) / seconds
