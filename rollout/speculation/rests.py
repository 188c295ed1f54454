"""The times in which no source is asked for drafts, since they did not pay."""

from __future__ import annotations

FIRST, LONGEST = 4, 64  # steps of a rest: doubled each time that drafts do not pay
LONGEST_WITHOUT = 8  # where there was no proposal: it costs only the search,
SEARCHES = 4  # of which so many may be in vain for each step of a rest


class Rests:
    """Count the steps of a rest. It ends early where fewer sequences run, for whom a draft costs less."""

    def __init__(self, *, search_is_dear: bool = False) -> None:
        """Start outside of a rest. search_is_dear: few sequences rest without proposals too, as many do."""
        self._search_is_dear = search_is_dear
        self._length = FIRST
        self._left = 0
        self._num_rows = 0  # of the step in which it began
        self._were_proposals = False  # in that step
        self.is_trial = False  # whether this step is the first after a rest

    @property
    def is_resting(self) -> bool:
        return self._left > 0

    @property
    def why(self) -> str | None:
        """The reason for the rest, in words; None outside of one."""
        if not self._left:
            return None
        why = "no draft would have paid" if self._were_proposals else "nothing was proposed"
        return f"resting for {self._left} more steps: {why}"

    def next_step(self, num_rows: int) -> bool:
        """Count a step; returns whether it is part of a rest."""
        was_resting = self._left > 0
        if was_resting and 2 * num_rows <= self._num_rows:
            self._left, self._length = 0, FIRST
        elif was_resting:
            self._left -= 1
        self.is_trial = was_resting and self._left == 0
        return self._left > 0

    def begin(self, num_rows: int, *, were_proposals: bool) -> None:
        """Begin a rest after this step, in which no draft would have paid."""
        self._num_rows, self._were_proposals = num_rows, were_proposals
        if were_proposals:
            self._left, self._length = self._length, min(2 * self._length, LONGEST)
        else:
            self._left = LONGEST_WITHOUT if self._search_is_dear else min(num_rows // SEARCHES, LONGEST_WITHOUT)

    def paid(self) -> None:
        """Hear that drafts pay: the next rest is short."""
        self._length = FIRST
