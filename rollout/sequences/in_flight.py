"""Launched steps that have not landed, as far as one sequence has rows in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class InFlight:
    """Counts the launched steps that hold rows of a sequence's present incarnation."""

    num_steps: int = 0  # in a pipeline there may be several
    num_rows: int = 0  # of those steps: rows that have not gone through this stage yet
    num_tokens: int = 0  # that those steps will add to the sequence: 0 or 1

    def launched(self, num_rows: int, adds_token: bool) -> None:
        """Count a step that was launched. Comes after the managers took it."""
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_tokens = int(adds_token)

    def left_first_stage(self, num_rows: int) -> None:
        """Take off rows that went through the first stage of a pipeline: the managers count them now."""
        self.num_rows -= num_rows

    def landed(self) -> None:
        """Take off a step that is done. Only the newest launched one adds a token."""
        self.num_steps -= 1
        if self.num_steps == 0:
            self.num_rows = self.num_tokens = 0

    def forget(self) -> None:
        """Count nothing any more: the results of these steps will be dropped."""
        self.num_steps = self.num_rows = self.num_tokens = 0
