"""Samples packed one after another into one row for the trainer's forward, without padding.

Letters: N rows of L tokens in S sequences; L is N, unless sequences share rows (`shared_prefixes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ....rollout.media.images import Images
from ...image_inputs import image_keywords, joined
from .shared_prefixes import RowTree


@dataclass(frozen=True)
class Sample:
    """One sampled sequence with the values that the trainer needs."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # the sampled tokens, at least one
    logprobs: tuple[float, ...]  # from the engine, one per sampled token
    advantage: float
    num_older: int = 0  # first sampled tokens, which older weights have drawn
    counts: bool = True  # whether its tokens count in the loss; their log-probabilities are compared in any case
    sampled: tuple[bool, ...] | None = None  # of each of token_ids: whether it was sampled, or is an environment's;
    # None: all were
    forced: tuple[bool, ...] | None = None  # of each sampled token: whether a grammar left no choice of it, so that it
    # does not count either; None: none was
    images: Images | None = None  # among its tokens
    answer_size: int | None = None  # of a part of an answer: tokens of the whole that count; None: it is the whole
    is_first: bool = True  # among the parts with tokens that count, so that the answer counts as one
    group: int = 0  # number of its prompt among those of the rank's step

    @property
    def size(self) -> int:
        """Number of tokens that count, of the answer whose part it is."""
        return sum(self.mask) if self.answer_size is None else self.answer_size

    @property
    def mask(self) -> list[bool]:
        """Whether each sampled token counts in the loss."""
        return [self.counts and not is_forced for is_forced in self.forced or [False] * len(self.logprobs)]

    @property
    def targets(self) -> list[int]:
        """The positions in token_ids of the sampled tokens."""
        return [at for at in range(len(self.token_ids)) if self.sampled is None or self.sampled[at]]

    def has_gradient(self, *, always: bool) -> bool:
        """Whether the loss depends on its log-probabilities. always: it has a term that needs no advantage."""
        return self.counts and (always or self.advantage != 0.0)

    @property
    def num_rows(self) -> int:
        """Number of rows of its forward. The last token is a target only, not an input."""
        return len(self.prompt_ids) + len(self.token_ids) - 1

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The tokens of these rows."""
        return *self.prompt_ids, *self.token_ids[:-1]


@dataclass(frozen=True)
class PackedBatch:
    """The rows of S sequences in one batch, with M sampled tokens."""

    input_ids: Tensor  # int64 [1, N]
    position_ids: Tensor  # int64 [1, N]
    packing: Mapping[str, object]  # the keyword that tells of the sequences: their row offsets, or the rows they share
    logit_rows: Tensor  # int64 [M]: the row before each sampled token
    targets: Tensor  # int64 [M]
    logprobs: Tensor  # float32 [M]: of the behaviour policy
    advantages: Tensor  # float32 [M]
    is_older: Tensor  # bool [M]: drawn by older weights than the trainer's
    mask: Tensor  # bool [M]: counts in the loss
    lengths: tuple[int, ...]  # number of sampled tokens of each sequence
    sizes: tuple[int, ...] = ()  # of each sequence: tokens of its answer that count, see `Sample.size`
    num_answers: int = 0  # that have their first part here
    of_images: Mapping[str, object] = field(default_factory=dict)  # further keywords of the forward, where it has some

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return self.targets.shape[0]

    @property
    def has_ratio(self) -> Tensor:
        """Bool [M]: whether a token of older weights counts, with a ratio p / p_behaviour. Of one that a grammar left
        no choice of, the log-probability is the model's own, which did not draw it."""
        return self.is_older & self.mask

    def kept(self, logits: Tensor) -> Tensor:
        """Return the logits [M, V] of a forward's output [1, M, V]. Some classes of images and text compute those of
        all N rows, whatever they are asked for."""
        return logits[0] if logits.shape[1] == len(self.logit_rows) else logits[0, self.logit_rows]

    def model_inputs(self) -> dict[str, object]:
        """Return the keyword arguments with which a transformers causal LM computes logits [1, M, V]."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "logits_to_keep": self.logit_rows,
            "use_cache": False,
            **self.packing,
            **self.of_images,
        }


def pack(
    samples: Sequence[Sample], device: torch.device, module: PreTrainedModel | None = None, *, shares: bool = False
) -> PackedBatch:
    """Pack the samples one after another into one batch. module: needed for samples with images. shares: those that
    begin alike have rows in common, unless some have images, which their tokens do not tell apart."""
    tree = RowTree(shares=shares and all(sample.images is None for sample in samples))
    rows: list[int] = []
    targets: list[int] = []
    for sample in samples:
        own = tree.add(sample.input_ids)
        before = len(sample.prompt_ids) - 1
        rows += [own[before + at] for at in sample.targets]
        targets += [sample.token_ids[at] for at in sample.targets]
    return PackedBatch(
        input_ids=torch.tensor([tree.token_ids], device=device),
        position_ids=torch.tensor([tree.positions], device=device),
        packing=tree.packing(device),
        logit_rows=torch.tensor(rows, device=device),
        targets=torch.tensor(targets, device=device),
        logprobs=torch.tensor([p for s in samples for p in s.logprobs], dtype=torch.float32, device=device),
        advantages=torch.tensor([s.advantage for s in samples for _ in s.logprobs], dtype=torch.float32, device=device),
        is_older=torch.tensor([i < s.num_older for s in samples for i in range(len(s.logprobs))], device=device),
        mask=torch.tensor([counts for s in samples for counts in s.mask], device=device),
        lengths=tuple(len(s.logprobs) for s in samples),
        sizes=tuple(s.size for s in samples),
        num_answers=sum(s.is_first and any(s.mask) for s in samples),
        of_images=_of_images(samples, device, module),
    )


def _of_images(samples: Sequence[Sample], device: torch.device, module: PreTrainedModel | None) -> Mapping[str, object]:
    """Return the keywords with which a forward takes the images of samples; none where they have none."""
    inputs = [one for sample in samples if sample.images is not None for one in sample.images.inputs]
    if not inputs:
        return {}
    assert module is not None, "the samples have images"
    rows = [torch.tensor(sample.input_ids) for sample in samples]
    ids = pad_sequence(rows, batch_first=True).to(device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(device)
    tensors = {name: joined([one[name] for one in inputs]) for name in inputs[0]}
    return image_keywords(module, ids, mask, tensors) | _rotary_positions(samples, device)


def _rotary_positions(samples: Sequence[Sample], device: torch.device) -> dict[str, object]:
    """Return the positions of all rows where some have several, as the engine has read them: whatever was drawn."""
    found = []
    for sample in samples:
        own = np.arange(sample.num_rows)
        found.append(np.atleast_2d(own if sample.images is None else sample.images.rotary_positions(own)))
    num_parts = max(len(own) for own in found)
    if num_parts == 1:
        return {}
    rows = np.concatenate([np.broadcast_to(own, (num_parts, own.shape[1])) for own in found], axis=1)
    return {"position_ids": torch.from_numpy(rows)[:, None].to(device)}
