"""The rows of one sequence in launched steps that are not committed yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class InFlight:
    """Count the launched steps that hold rows of a sequence's current incarnation."""

    num_steps: int = 0  # in a pipeline there may be several
    num_rows: int = 0  # rows of these steps that this stage has not processed yet
    num_tokens: int = 0  # tokens that these steps will add to the sequence: 0 or 1

    def launched(self, num_rows: int, adds_token: bool) -> None:
        """Count a launched step. Called after the managers have received it."""
        self.num_steps += 1
        self.num_rows += num_rows
        self.num_tokens = int(adds_token)

    def left_first_stage(self, num_rows: int) -> None:
        """Subtract rows that have left the first stage of a pipeline: the managers count them now."""
        self.num_rows -= num_rows

    def committed(self) -> None:
        """Subtract a committed step. Only the newest launched one adds a token."""
        self.num_steps -= 1
        if self.num_steps == 0:
            self.num_rows = self.num_tokens = 0

    def forget(self) -> None:
        """Set all counts to 0: the results of these steps will be dropped."""
        self.num_steps = self.num_rows = self.num_tokens = 0
