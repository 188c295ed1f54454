"""The engine's log-probabilities of the newest samples, found again by their tokens and images when the trainer scores
them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from ...rollout.completion import Completion
from .images import NO_IMAGES, ImagesInTurn
from .packed_rows import PackedRows, sequence_key

ImageTensors = Mapping[str, Tensor]


class DrawnLogprobs:
    """The samples of the newest generation of each mode, "train" and "eval"; and the gap since it was last taken.

    Trainers shuffle and divide a generation, and score it several times. The gap is over the tokens that the present
    weights have drawn: of other weights' tokens, the log-probabilities differ because the weights do.
    """

    def __init__(self) -> None:
        self._drawn: dict[str, tuple[Hashable, _Generation]] = {}
        self._gap = 0.0
        self._num_tokens = 0

    def remember(
        self,
        mode: str,
        weights: Hashable,
        completions: Iterable[Completion],
        images: Sequence[ImageTensors] | None = None,
    ) -> None:
        """Keep the samples of one generation in place of those of the one before. weights: a name of what drew them;
        images: of each sample's prompt."""
        generation = _Generation()
        for completion, its_images in zip(completions, images or repeat(NO_IMAGES), strict=False):
            generation.add(completion, its_images)
        self._drawn[mode] = weights, generation

    def recall(self, rows: PackedRows, weights: Hashable, images: ImageTensors = NO_IMAGES) -> Tensor | None:
        """Return the engine's log-probabilities float32 [M] of the scored tokens, or None unless `weights` drew them
        all. images: of the batch."""
        found = [
            known
            for known, scored in zip(self._found(rows, weights, images), rows.sequences(), strict=True)
            if scored.num_scored
        ]
        if not found or None in found:
            return None
        return torch.tensor([value for its in found for value in its or ()], device=rows.targets.device)

    def compare(self, rows: PackedRows, logprobs: Tensor, weights: Hashable, images: ImageTensors = NO_IMAGES) -> None:
        """Compare the trainer's log-probabilities float32 [M] with the engine's, where `weights` drew the tokens."""
        for expected, scored in zip(self._found(rows, weights, images), rows.sequences(), strict=True):
            if expected is None or not scored.num_scored:
                continue
            difference = logprobs[scored.places].cpu() - torch.tensor(expected)
            gap = difference.abs().max().item()
            self._gap = max(self._gap, math.inf if math.isnan(gap) else gap)  # no number is larger, for other ranks too
            self._num_tokens += len(expected)

    def _found(self, rows: PackedRows, weights: Hashable, images: ImageTensors) -> list[tuple[float, ...] | None]:
        """Return the engine's log-probabilities of each sequence; None of those that `weights` have not drawn."""
        drawn = [its.find(rows, images) for name, its in self._drawn.values() if name == weights]
        if not drawn:
            return [None for _ in rows.sequences()]
        return [next((one for one in each if one is not None), None) for each in zip(*drawn, strict=True)]

    def take(self) -> tuple[float, int]:
        """Return the largest difference since the last call, and the number of tokens that it is over."""
        taken = self._gap, self._num_tokens
        self._gap, self._num_tokens = 0.0, 0
        return taken


class _Generation:
    """The log-probabilities of one generation's samples, by their tokens and the images of their prompts."""

    def __init__(self) -> None:
        self._images: dict[bytes, list[ImageTensors]] = {}  # different ones, by the tokens of the prompt
        self._logprobs: dict[tuple[bytes, int], tuple[float, ...]] = {}  # by all tokens, and which images

    def add(self, completion: Completion, images: ImageTensors) -> None:
        """Add a sample."""
        known = self._images.setdefault(sequence_key(completion.prompt_ids, 0), [])
        number = next((at for at, one in enumerate(known) if _are_equal(one, images)), len(known))
        if number == len(known):
            known.append(images)
        ids = [*completion.prompt_ids, *completion.token_ids]
        self._logprobs[sequence_key(ids, len(completion.token_ids)), number] = completion.logprobs

    def find(self, rows: PackedRows, images: ImageTensors) -> list[tuple[float, ...] | None]:
        """Return the log-probabilities of each sequence of a batch; None of a sequence that is not of this
        generation, and behind one in a batch with images, which are then not known to be whose."""
        found: list[tuple[float, ...] | None] = []
        in_turn, is_lost = ImagesInTurn(images), False
        for scored in rows.sequences():
            number = None if is_lost else in_turn.take(self._images.get(scored.prompt, []))
            is_lost = is_lost or (number is None and bool(images))
            found.append(None if number is None else self._logprobs.get((scored.key, number)))
        return found


def _are_equal(one: ImageTensors, other: ImageTensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name] is other[name] or torch.equal(one[name], other[name]) for name in one
    )
