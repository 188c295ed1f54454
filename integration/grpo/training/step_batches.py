"""The micro-batches of one optimizer step: made from samples, and run in the same number on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ....rollout.media.reader import why_no_images
from ....rollout.model.hosted_model import HostedModel
from ...ranks import Ranks
from ..backends.backend import TrainerBackend
from ..settings.training import TrainSettings
from .activations import measure
from .loss import RatioNumbers, ratio_numbers
from .microbatches import Cost, Microbatch, even_microbatches, microbatches, rows_of, whole
from .packing import PackedBatch, Sample, pack
from .reference import Reference
from .shared_prefixes import why_no_shared_prefixes
from .surrogates import SURROGATES, amount

logger = logging.getLogger(__name__)


@dataclass
class Batch:
    """A micro-batch, with values that do not change from one pass to the next."""

    samples: Sequence[Sample]
    packed: PackedBatch
    learns: bool
    is_last: bool
    reference: Tensor | None
    proximal: Tensor | None = None  # its log-probabilities before the step's first optimizer step
    ratios: RatioNumbers = field(default_factory=RatioNumbers)  # of `proximal` to those it was drawn with

    @property
    def has_older(self) -> bool:
        """Whether older weights than the step's have drawn some of its tokens."""
        return any(sample.num_older for sample in self.samples)

    def note_proximal(self, logprobs: Tensor, bound: float, sequence_bound: float) -> None:
        """Keep its log-probabilities before the step's first optimizer step, unless it has them."""
        if self.proximal is not None:
            return
        self.proximal, packed = logprobs.detach(), self.packed
        if self.has_older:
            self.ratios = ratio_numbers(
                self.proximal, packed.logprobs, packed.has_ratio, packed.lengths, bound, sequence_bound
            )


@dataclass
class StepBatches:
    """The micro-batches of an optimizer step so far, and what its samples amount to."""

    learning: list[Batch] = field(default_factory=list)
    amount: int = 0  # what this rank's samples add to the divisor of the sum
    num_counted: int = 0  # their tokens that count
    num_without_gradient: int = 0  # samples
    num_unmeasured: int = 0  # samples that have no forward before the step's first optimizer step
    num_rows: int = 0  # of one forward of all micro-batches that have one
    num_shared: int = 0  # rows that these would have had in addition, if no samples had any in common


class BatchMaker:
    """A maker of micro-batches: it divides samples, as the settings say, and packs them."""

    def __init__(
        self, hosted: HostedModel, backend: TrainerBackend, settings: TrainSettings, ranks: Ranks, max_new_tokens: int,
        reference: Reference | None,
    ) -> None:  # fmt: skip
        """Look at whether samples can share rows, and measure what a micro-batch keeps, where its bytes are limited.
        Call it before the module is sharded."""
        self._hosted, self._settings, self._ranks, self._reference = hosted, settings, ranks, reference
        self._needs_last = backend.needs_last
        self._max_new_tokens = max_new_tokens
        self._shares = settings.share_prefixes and self._can_share(
            [hosted] if reference is None else [hosted, reference.model]
        )
        self._activations = (
            measure(hosted, has_entropy=settings.entropy_coefficient != 0.0) if settings.microbatch_bytes else None
        )

    def made(self, samples: Iterable[Sample], into: StepBatches) -> Iterator[Batch]:
        """Yield the micro-batches that have a forward; note all in `into`."""
        settings, divisor = self._settings, SURROGATES[self._settings.loss].divisor
        for part in self._divided(samples):
            packed = pack(part.samples, self._ranks.device, self._hosted.module, shares=self._shares)
            into.num_counted += int(packed.mask.sum())
            into.amount += amount(divisor, packed.mask, packed.num_answers, self._max_new_tokens)
            if not part.learns:
                into.num_without_gradient += len(part.samples)
                if settings.skip_forward:
                    into.num_unmeasured += len(part.samples)
                    continue
            into.num_rows += packed.num_rows
            into.num_shared += sum(sample.num_rows for sample in part.samples) - packed.num_rows
            reference = self._reference.logprobs(packed) if part.learns and self._reference is not None else None
            batch = Batch(part.samples, packed, part.learns, part.is_last, reference)
            if part.learns:
                into.learning.append(batch)
            yield batch

    def _divided(self, samples: Iterable[Sample]) -> Iterator[Microbatch]:
        settings = self._settings
        learns = partial(Sample.has_gradient, always=settings.has_terms)
        if num := settings.gradient_accumulation_steps:
            return even_microbatches(samples, num, learns, shares=self._shares)
        cost: Cost = rows_of
        limit: float | None = settings.num_microbatch_rows
        if self._activations is not None:
            limit, cost = settings.num_microbatch_bytes, self._activations.of
        if self._hosted.has_states:
            cost = whole(cost)
        return microbatches(samples, limit or 0, cost, learns, shares=self._shares, needs_last=self._needs_last)

    @staticmethod
    def _can_share(models: Sequence[HostedModel]) -> bool:
        """Return whether samples can have rows in common in the forwards of all these models."""
        for model in models:
            if (why := why_no_shared_prefixes(model)) is not None:
                logger.info("samples share no rows in training: %s", why)
                return False
        return True


class Turn(NamedTuple):
    """One forward of a rank."""

    batch: Batch
    learns: bool  # whether it has a backward pass
    is_last: bool  # whether it is the last one that has
    is_extra: bool  # whether its numbers do not count: it is there for the other ranks


class Turns:
    """The order in which a rank's micro-batches go through the model, so that all ranks meet in its collectives."""

    def __init__(self, hosted: HostedModel, backend: TrainerBackend, ranks: Ranks) -> None:
        """Look at the module. Call it before the module is sharded."""
        self._talks, self._ranks = backend.talks_in_forward, ranks
        self._takes_images = why_no_images(hosted.module) is None

    def of(self, batches: Iterable[Batch], *, forward_only: bool = False) -> Iterator[Turn]:
        """Yield the turns of a pass. forward_only: none of them has a backward pass.

        Other ranks may have more micro-batches, and their collectives in forward and backward passes need this rank:
        where there are such, all ranks run those without a backward pass first, then the others, as many as any has.
        """
        if not self._talks:
            for batch in batches:
                yield Turn(batch, batch.learns and not forward_only, batch.is_last, False)
            return
        own = list(batches)
        for learns in (False, True):
            kind = [batch for batch in own if (batch.learns and not forward_only) is learns]
            num_forwards = int(self._ranks.largest(len(kind)))
            for index in range(num_forwards):
                is_extra = index >= len(kind)
                batch = own[-1] if is_extra else kind[index]
                self._refuse_other_kind(batch)
                yield Turn(batch, learns, learns and index + 1 == num_forwards, is_extra)

    def _refuse_other_kind(self, batch: Batch) -> None:
        """Raise ValueError, on all ranks, where some run the encoder of images and others do not: its parts are
        sharded, and the ranks would wait for each other."""
        num_ranks = self._ranks.num_ranks
        if num_ranks > 1 and self._takes_images:
            num = int(self._ranks.total(float(bool(batch.packed.of_images))))
            if 0 < num < num_ranks:
                raise ValueError(
                    f"{num} of {num_ranks} ranks have images in this micro-batch: a trainer that shards the encoder of "
                    'images needs some in each. Use trainer="ddp", or images in every prompt'
                )
