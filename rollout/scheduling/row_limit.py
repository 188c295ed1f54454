"""The rows of a step where memory runs out: fewer after a failure, more again while steps succeed."""

from __future__ import annotations

_PATIENCE = (32, 4096)  # good steps before the limit is doubled: at first, and after many failures


class RowLimit:
    """The largest number of rows that a step may have now."""

    def __init__(self, most: int) -> None:
        """Start with the configured limit, `most`."""
        self.now = self._most = most
        self._patience = _PATIENCE[0]
        self._num_good = 0

    def halve(self, num_rows: int) -> None:
        """Allow half the rows of a step that did not find its memory. The next growth needs twice as many good steps:
        each failure takes the KV of all running sequences back."""
        self.now, self._num_good = max(num_rows // 2, 1), 0
        self._patience = min(2 * self._patience, _PATIENCE[1])

    def on_good_step(self, num_steps: int = 1) -> None:
        """Count so many good steps; allow more rows again after enough of them."""
        if self.now == self._most:
            return
        self._num_good += num_steps
        if self._num_good >= self._patience:
            self.now, self._num_good = min(2 * self.now, self._most), 0
