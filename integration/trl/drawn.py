"""The engine's log-probabilities of the newest samples, found again by their tokens when the trainer scores them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from ...rollout.completion import Completion
from .packed_rows import PackedRows, sequence_key


class DrawnLogprobs:
    """The samples of the newest generation of each mode, "train" and "eval"; and the gap since it was last taken.

    Trainers shuffle and divide a generation, and score it several times. The gap is over the tokens that the present
    weights have drawn: of other weights' tokens, the log-probabilities differ because the weights do.
    """

    def __init__(self) -> None:
        self._drawn: dict[str, tuple[Hashable, dict[bytes, tuple[float, ...]]]] = {}
        self._gap = 0.0
        self._num_tokens = 0

    def remember(self, mode: str, weights: Hashable, completions: Iterable[Completion]) -> None:
        """Keep the samples of one generation in place of those of the one before. weights: a name of what drew them."""
        logprobs = {sequence_key([*c.prompt_ids, *c.token_ids], len(c.token_ids)): c.logprobs for c in completions}
        self._drawn[mode] = weights, logprobs

    def recall(self, rows: PackedRows, weights: Hashable) -> Tensor | None:
        """Return the engine's log-probabilities float32 [M] of the scored tokens, or None unless `weights` drew them
        all."""
        drawn = self._drawn_by(weights)
        found = [next((its[key] for its in drawn if key in its), None) for key, _ in rows.sequences()] if drawn else []
        if not found or None in found:
            return None
        return torch.tensor([value for its in found for value in its or ()], device=rows.targets.device)

    def compare(self, rows: PackedRows, logprobs: Tensor, weights: Hashable) -> None:
        """Compare the trainer's log-probabilities float32 [M] with the engine's, where `weights` drew the tokens."""
        drawn = self._drawn_by(weights)
        for key, places in rows.sequences() if drawn else ():
            expected = next((its[key] for its in drawn if key in its), None)
            if expected is None:
                continue
            difference = logprobs[places].cpu() - torch.tensor(expected)
            self._gap = max(self._gap, difference.abs().max().item())
            self._num_tokens += len(expected)

    def _drawn_by(self, weights: Hashable) -> list[dict[bytes, tuple[float, ...]]]:
        return [its for name, its in self._drawn.values() if name == weights]

    def take(self) -> tuple[float, int]:
        """Return the largest difference since the last call, and the number of tokens that it is over."""
        taken = self._gap, self._num_tokens
        self._gap, self._num_tokens = 0.0, 0
        return taken
