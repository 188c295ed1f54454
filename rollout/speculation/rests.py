"""The times in which no source is asked for drafts, since they did not pay.

What pays depends on how many sequences run: a step of few is as long with some rows more, a step of many is not. So
steps are classed by the power of two that their sequences reach, and each class rests for itself. A load whose batches
shrink, such as a rollout, passes through all classes again and again; were its rests forgotten where another class
begins, sources would be asked in vain at each passage.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lengths import FIRST_GAIN

FIRST, LONGEST = 4, 64  # steps of a rest: doubled each time that drafts do not pay
FIRST_WITHOUT, LONGEST_WITHOUT = 2, 16  # where there was no proposal: doubled until drafts pay. They are shorter: only
# the search was in vain, and the host's look between two steps
SEARCHES, MOST_AT_FIRST = 4, 8  # many sequences begin with a step for each so many of them, at most so many steps
GAIN_WEIGHT = 0.1  # of the newest step; a rest follows where steps with drafts bring less than steps without
PAYS = 1.05  # gain with which sources are asked for all sequences, and the next rest is short again


@dataclass(slots=True)
class _Class:
    """The steps of one class, as far as they are known."""

    length: int = FIRST  # steps of the next rest
    length_without: int = FIRST_WITHOUT  # the same, where there is no proposal
    left: int = 0  # steps of this one
    were_proposals: bool = False  # in the step in which it began
    gain: float = FIRST_GAIN  # of tokens a second by drafts, in recent steps


class Rests:
    """Count the steps of the rests, and learn whether drafts pay."""

    def __init__(self, *, search_is_dear: bool = False) -> None:
        """Start outside of a rest. search_is_dear: without proposals few sequences rest at once as long as many do."""
        self._search_is_dear = search_is_dear
        self._classes: dict[int, _Class] = {}
        self._newest = _Class()  # of the newest step
        self.is_trial = False  # whether this step is the first after a rest

    @property
    def is_resting(self) -> bool:
        """Whether the next step has no drafts, if it is of the newest one's class."""
        return self._newest.left > 0

    @property
    def why(self) -> str | None:
        """The reason for the rest, in words; None outside of one."""
        if not self._newest.left:
            return None
        why = "no draft would have paid" if self._newest.were_proposals else "nothing was proposed"
        return f"resting for {self._newest.left} more steps: {why}"

    def next_step(self, num_sequences: int) -> bool:
        """Count a step; returns whether it is part of a rest."""
        newest = self._newest = self._class(num_sequences)
        was_resting = newest.left > 0
        newest.left -= was_resting
        self.is_trial = was_resting and not newest.left
        return newest.left > 0

    @property
    def num_left(self) -> int:
        """The number of steps that are left of the newest one's rest, with that step itself."""
        return self._newest.left

    def further_steps(self, num_steps: int) -> None:
        """Count so many steps of the newest one's rest that have run without `next_step`, fewer than are left of it."""
        self._newest.left = max(self._newest.left - num_steps, 1)

    def begin(self, num_sequences: int, *, were_proposals: bool) -> None:
        """Begin a rest after a step of so many, in which no draft would have paid."""
        rest = self._newest = self._class(num_sequences)
        rest.were_proposals = were_proposals
        if were_proposals:
            rest.left, rest.length = rest.length, min(2 * rest.length, LONGEST)
        else:
            least = MOST_AT_FIRST if self._search_is_dear else min(num_sequences // SEARCHES, MOST_AT_FIRST)
            rest.left = max(rest.length_without, least)
            rest.length_without = min(2 * rest.length_without, LONGEST_WITHOUT)

    def pays(self, num_sequences: int) -> bool:
        """Return whether drafts have paid lately in steps of about so many."""
        return self._class(num_sequences).gain > PAYS

    def learn(self, num_sequences: int, gain: float) -> None:
        """Learn the gain of a step with drafts. A rest begins where they take more time than they save."""
        rest = self._class(num_sequences)
        if gain > 1:
            rest.length_without = FIRST_WITHOUT
        if rest.left > 0:  # the step is older than the rest
            return
        rest.gain += GAIN_WEIGHT * (gain - rest.gain)
        if rest.gain < 1:
            rest.gain = FIRST_GAIN
            self.begin(num_sequences, were_proposals=True)
        elif rest.gain > PAYS:
            rest.length = FIRST

    def _class(self, num_sequences: int) -> _Class:
        return self._classes.setdefault(num_sequences.bit_length(), _Class())
