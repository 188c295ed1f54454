"""The trainer of the main job: one GRPO update with any backend, and its measured gap to the engine."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....kernels.sampling.entropy import row_entropy
from ....kernels.sampling.logprobs import selected_logprobs
from ....rollout.model.hosted_model import HostedModel
from ...ranks import Ranks
from ..backends.adamw import learning_rate
from ..backends.backend import TrainerBackend
from ..backends.ddp import DdpBackend
from ..backends.deepspeed import DeepSpeedBackend
from ..backends.fsdp2 import Fsdp2Backend
from ..settings.config import JobConfig
from ..settings.training import TrainSettings
from . import checkpointing
from .loss import PolicyLoss, RatioNumbers, importance_weights, policy_loss
from .microbatches import minibatches
from .packing import PackedBatch, Sample
from .reference import Reference
from .step_batches import Batch, BatchMaker, StepBatches, Turns

# Losses are divided by it while the number of tokens is not known yet, and the gradients are scaled at the end. A power
# of two: it rounds nothing.
_NORMALISER = 1024


@dataclass(frozen=True)
class TrainStats:
    """The numbers of one update, over all ranks. Those of the loss are of the last epoch."""

    logprob_gap: float  # largest |engine - trainer| over the step's tokens that these weights have drawn, before the
    # first optimizer step
    loss: float  # mean over the optimizer steps
    kl: float  # mean over the tokens that count, whatever the loss averages
    clip_fraction: float  # of those tokens
    grad_norm: float  # mean over the optimizer steps
    learning_rate: float
    ratios: RatioNumbers  # of tokens of older weights, before the first optimizer step
    num_without_gradient: int = 0  # samples that had no backward pass
    num_unmeasured: int = 0  # samples whose gap was not measured: they had no forward before the first optimizer step
    num_rows: int = 0  # of one forward of all samples that had one
    num_shared: int = 0  # rows that these had in common, and that were computed once


@dataclass(frozen=True)
class SampleGap:
    """The sample of this rank whose log-probabilities differ most between engine and trainer."""

    gap: float
    sample: Sample


class _Done(NamedTuple):
    """One optimizer step."""

    losses: Sequence[PolicyLoss]  # of this rank's micro-batches
    scale: float  # by which the losses were multiplied
    norm: float


def make_backend(config: JobConfig, ranks: Ranks) -> TrainerBackend:
    """Make the backend that the job's settings name. It wraps no model yet."""
    makers: dict[str, Callable[[], TrainerBackend]] = {
        "ddp": lambda: DdpBackend(config.train, ranks),
        "fsdp2": lambda: Fsdp2Backend(config.train, ranks),
        "deepspeed": lambda: DeepSpeedBackend(config.train, ranks, config.deepspeed.zero_stage),
    }
    return makers[config.trainer]()


class GrpoTrainer:
    """GRPO on a hosted model. The constructor passes the module to the backend, which wraps or shards it.

    hosted: the engine's model where the engine aliases the trainer's module; else the module, adopted before for its
    numerics. num_steps: of the whole run, at whose end a schedule of the learning rate ends. max_new_tokens: the most
    that a sample may have, by which the loss "dr_grpo" divides. announce_step: makes a
    context for the optimizer's step; for an engine that aliases the module, it is `RolloutService.optimizer_step`.
    reference: the model of the KL, which is frozen; None: the module as it is now, or without its adapters.

    on_gap: called on all ranks, before the optimizer's step, if any rank's gap is not 0.0: with the number of the step,
    the largest gap, and this rank's sample with its largest one. None: nothing is called.
    """

    on_gap: Callable[[int, float, SampleGap | None], None] | None = None

    def __init__(
        self,
        hosted: HostedModel,
        backend: TrainerBackend,
        settings: TrainSettings,
        temperature: float,
        ranks: Ranks,
        *,
        num_steps: int = 0,
        max_new_tokens: int = 1,
        announce_step: Callable[[], AbstractContextManager[None]] = nullcontext,
        reference: PreTrainedModel | None = None,
    ) -> None:
        self.backend = backend
        self._hosted = hosted
        self._settings = settings
        self._temperature = temperature
        self._ranks = ranks
        self._announce_step = announce_step
        self._num_steps = num_steps
        held_to = Reference(hosted, temperature, reference) if settings.kl_coefficient else None
        if settings.gradient_checkpointing:
            checkpointing.switch_on(hosted.trained_module)
        self._maker = BatchMaker(hosted, backend, settings, ranks, max_new_tokens, held_to)
        self._turns = Turns(hosted, backend, ranks)
        backend.wrap(hosted.trained_module)

    def update(self, samples: Iterable[Sample], step: int) -> TrainStats:
        """Update the model with one step's samples (this rank's share of them). All ranks call it together.

        Samples may come while the first of them are trained on, if the backend does not need all ranks in each forward
        and there are no mini-batches. Those without a gradient, whose advantage is 0 or whose tokens do not count, have
        no backward pass, and none of their rows is in another sample's micro-batch; they count in the divisor of the
        loss. Where micro-batches have the same rows as with backward passes of zeros, the gradient has the same bits;
        where they do not, its sums are over other groups of rows, and differ by rounding.

        Of mini-batches each has an optimizer step of its own, in the order of the samples' groups. Ratios are to the
        weights before the first of these steps: to the engine's log-probabilities, which are the trainer's to the bit,
        so that nothing is computed for them; only the gap of the later mini-batches costs a forward before it.

        Raises ValueError where the groups cannot be divided into mini-batches.
        """
        rate = learning_rate(self._settings, step, self._num_steps)
        self.backend.set_learning_rate(rate)
        self._hosted.trained_module.train()
        parts = [StepBatches() for _ in range(self._settings.minibatches_per_step)]
        first, *later = self._made(samples, parts)
        worst, gap = self._measured(later, parts[1:]), 0.0
        for epoch in range(self._settings.epochs_per_step):
            done: list[_Done] = []
            for part in parts:
                is_first = epoch == 0 and part is parts[0]
                normaliser = _NORMALISER if self.backend.scales_gradients else self._divisor(part)
                losses, own = self._backward(first if is_first else part.learning, normaliser)
                if is_first:
                    gap = self._reported(step, _larger(worst, own))
                scale = normaliser / self._divisor(part)
                with self._announce_step():
                    done.append(_Done(losses, scale, self.backend.step(scale)))
        return self._stats(gap, rate, parts, done)

    def _made(self, samples: Iterable[Sample], parts: Sequence[StepBatches]) -> list[Iterable[Batch]]:
        """Return the micro-batches of each part of a step that have a forward. Those of a single part are made as they
        are asked for, where the backend may have them so."""
        if len(parts) == 1:
            made = self._maker.made(samples, parts[0])
            return [list(made) if self.backend.needs_all_batches else made]
        divided = zip(minibatches(samples, len(parts)), parts, strict=True)
        return [list(self._maker.made(its, part)) for its, part in divided]

    def _measured(self, made: Sequence[Iterable[Batch]], parts: Sequence[StepBatches]) -> SampleGap | None:
        """Run the later parts of a step forward, before the first optimizer step. Returns the sample with the largest
        gap; None: no gap, or `skip_forward` is set, and no token is of older weights, whose ratios need the forward."""
        batches = [batch for its in made for batch in its]
        if not parts:
            return None
        if self._settings.skip_forward and not self._ranks.largest(float(any(one.has_older for one in batches))):
            for part in parts:
                part.num_unmeasured += sum(len(batch.samples) for batch in part.learning)
            for batch in batches:
                batch.note_proximal(batch.packed.logprobs, *self._bounds)
            return None
        worst = None
        for batch, _, _, is_extra in self._turns.of(batches, forward_only=True):
            with torch.no_grad(), self._hosted.training_numerics():
                logprobs = self._logprobs(self._logits(batch.packed), batch.packed)
            if not is_extra:
                batch.note_proximal(logprobs, *self._bounds)
                worst = _larger(worst, _gap_of(batch, logprobs))
        return worst

    def _reported(self, step: int, own: SampleGap | None) -> float:
        """Return the largest gap of all ranks, and pass it on if there is one."""
        gap = self._ranks.largest(own.gap if own is not None else 0.0)
        if gap != 0.0 and self.on_gap is not None:
            self.on_gap(step, gap, own)
        return gap

    def _stats(self, gap: float, rate: float, parts: Sequence[StepBatches], done: Sequence[_Done]) -> TrainStats:
        """Return the numbers of an update. done: the optimizer steps of its last epoch."""
        total = self._ranks.total
        losses = [loss for one in done for loss in one.losses]
        of_a_token = _NORMALISER / max(total(sum(part.num_counted for part in parts)), 1)
        return TrainStats(
            logprob_gap=gap,
            loss=sum(total(sum(item.loss.item() for item in one.losses)) * one.scale for one in done) / len(done),
            kl=total(sum(item.kl for item in losses)) * of_a_token,
            clip_fraction=total(sum(item.clip_fraction for item in losses)) * of_a_token,
            grad_norm=sum(one.norm for one in done) / len(done),
            learning_rate=rate,
            ratios=self._ratios([batch for part in parts for batch in part.learning]),
            num_without_gradient=int(total(sum(part.num_without_gradient for part in parts))),
            num_unmeasured=int(total(sum(part.num_unmeasured for part in parts))),
            num_rows=int(total(sum(part.num_rows for part in parts))),
            num_shared=int(total(sum(part.num_shared for part in parts))),
        )

    @property
    def _bounds(self) -> tuple[float, float]:
        """Return the bounds of the weights of tokens that older weights have drawn."""
        return self._settings.importance_bound, self._settings.sequence_bound

    def _divisor(self, part: StepBatches) -> int:
        """Return what the sum over all tokens of an optimizer step is divided by; 1 where no token of any rank
        counts."""
        return max(int(self._ranks.total(part.amount)), 1)

    def _ratios(self, batches: Sequence[Batch]) -> RatioNumbers:
        """Return the numbers of the ratios of all ranks' batches."""
        own, total = [batch.ratios for batch in batches], self._ranks.total
        return RatioNumbers(
            total(sum(one.num for one in own)), total(sum(one.total for one in own)),
            total(sum(one.num_bounded for one in own)), total(sum(one.num_dropped for one in own)),
            self._ranks.largest(max((one.most for one in own), default=0.0)),
        )  # fmt: skip

    def _backward(self, batches: Iterable[Batch], normaliser: int) -> tuple[list[PolicyLoss], SampleGap | None]:
        """Accumulate the gradients of one pass. Returns its losses and the sample with the largest gap in its forwards;
        None: no gap."""
        losses, worst = [], None
        for batch, learns, is_last, is_extra in self._turns.of(batches):
            with self._hosted.training_numerics():
                if not learns:
                    with torch.no_grad():
                        logprobs = self._logprobs(self._logits(batch.packed), batch.packed)
                else:
                    with self.backend.microbatch(is_last=is_last):
                        logprobs, loss = self._loss(batch, normaliser)
                        # The backend averages over ranks, and the loss is a sum of the ranks' shares.
                        self.backend.backward(loss.loss * (0 if is_extra else self._ranks.num_ranks))
                    if not is_extra:
                        losses.append(loss)
            if not is_extra:
                worst = _larger(worst, _gap_of(batch, logprobs))
        return losses, worst

    def _logits(self, packed: PackedBatch) -> Tensor:
        """Compute the logits [M, V] from which a batch's tokens were drawn."""
        return packed.kept(self.backend.forward(**packed.model_inputs()))

    def _logprobs(self, logits: Tensor, packed: PackedBatch) -> Tensor:
        return selected_logprobs(logits, packed.targets, self._temperature)

    def _loss(self, batch: Batch, normaliser: int) -> tuple[Tensor, PolicyLoss]:
        """Compute the log-probabilities of a batch's tokens, and its share of the loss."""
        packed, settings = batch.packed, self._settings
        logits = self._logits(packed)
        logprobs = self._logprobs(logits, packed)
        batch.note_proximal(logprobs, *self._bounds)
        assert batch.proximal is not None
        behaviour = torch.where(packed.is_older, batch.proximal, packed.logprobs)
        weights = importance_weights(
            batch.proximal, packed.logprobs, packed.has_ratio, packed.lengths, *self._bounds
        )  # fmt: skip
        advantages, kl_coefficient = packed.advantages, settings.kl_coefficient
        if settings.kl_in == "advantage" and batch.reference is not None:
            advantages = advantages - kl_coefficient * (behaviour - batch.reference)
            kl_coefficient = 0.0
        bonus = None
        if settings.entropy_coefficient:
            bonus = settings.entropy_coefficient * weights * row_entropy(logits, self._temperature)
        return logprobs, policy_loss(
            logprobs,
            behaviour,
            advantages * weights,
            packed.mask,
            normaliser,
            *settings.clip_bounds,
            batch.reference,
            kl_coefficient,
            name=settings.loss,
            lengths=packed.lengths,
            sizes=packed.sizes,
            num_counted=_NORMALISER,
            kl_weights=weights,
            bonus=bonus,
        )


def _gap_of(batch: Batch, logprobs: Tensor) -> SampleGap | None:
    """Return the sample of a batch whose log-probabilities differ most from the engine's; None: they are equal."""
    # Of older weights' tokens, the log-probabilities differ because the weights do.
    gaps = torch.where(batch.packed.is_older, 0.0, logprobs.detach() - batch.packed.logprobs).abs()
    gap, token = (value.item() for value in gaps.max(0))
    if gap == 0.0:
        return None
    gap = math.inf if math.isnan(gap) else gap  # no number is larger, for other samples and ranks too
    return SampleGap(gap, batch.samples[bisect(list(accumulate(batch.packed.lengths)), int(token))])


def _larger(first: SampleGap | None, second: SampleGap | None) -> SampleGap | None:
    """Return the larger gap, the first of equal ones."""
    if first is None or second is None:
        return first or second
    return first if second.gap <= first.gap else second
