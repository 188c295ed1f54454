"""The trainer of the main job: one GRPO update with any backend, and its measured gap to the engine."""

from __future__ import annotations

import copy
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ....kernels.sampling.logprobs import selected_logprobs
from ....rollout.media.reader import why_no_images
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
from .activations import measure
from .loss import PolicyLoss, RatioNumbers, importance_weights, policy_loss, ratio_numbers
from .microbatches import Microbatch, even_microbatches, microbatches, rows_of
from .packing import PackedBatch, Sample, pack
from .surrogates import SURROGATES, amount

# Losses are divided by it while the number of tokens is not known yet, and the gradients are scaled at the end. A power
# of two: it rounds nothing.
_NORMALISER = 1024


@dataclass(frozen=True)
class TrainStats:
    """The numbers of one update, over all ranks."""

    logprob_gap: float  # largest |engine - trainer| over the step's tokens that these weights have drawn, before the
    # first optimizer step
    loss: float
    kl: float  # mean over the tokens that count, whatever the loss averages
    clip_fraction: float  # of those tokens
    grad_norm: float
    learning_rate: float
    ratios: RatioNumbers  # of tokens of older weights, before the first optimizer step
    num_without_gradient: int = 0  # samples that had a forward, for the gap, and no backward pass
    num_unmeasured: int = 0  # samples that had no forward either: their gap was not measured


@dataclass(frozen=True)
class SampleGap:
    """The sample of this rank whose log-probabilities differ most between engine and trainer."""

    gap: float
    sample: Sample


@dataclass
class _Batch:
    """A micro-batch, with values that do not change from one pass to the next."""

    samples: Sequence[Sample]
    packed: PackedBatch
    learns: bool
    is_last: bool
    reference: Tensor | None
    proximal: Tensor | None = None  # its log-probabilities before the first optimizer step; the first pass sets it
    ratios: RatioNumbers = field(default_factory=RatioNumbers)  # likewise


@dataclass
class _StepBatches:
    """The micro-batches of a step so far, and what the step's samples amount to."""

    learning: list[_Batch] = field(default_factory=list)
    amount: int = 0  # what this rank's samples add to the divisor of the sum
    num_counted: int = 0  # their tokens that count
    num_without_gradient: int = 0
    num_unmeasured: int = 0


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
    ) -> None:
        self.backend = backend
        self._hosted = hosted
        self._settings = settings
        self._temperature = temperature
        self._ranks = ranks
        self._announce_step = announce_step
        self._num_steps = num_steps
        self._max_new_tokens = max_new_tokens
        self._takes_images = why_no_images(hosted.module) is None
        self._reference: HostedModel | None = None
        if settings.kl_coefficient and not hosted.adapters:
            frozen = copy.deepcopy(hosted.trained_module).requires_grad_(False).eval()  # before it is sharded
            invariant = hosted.numerics.guarantee is not None
            self._reference = HostedModel.adopt(
                frozen, dtype=None, device=None, invariant=invariant, k_blocks=hosted.k_blocks
            )
        if settings.gradient_checkpointing:
            checkpointing.switch_on(hosted.trained_module)
        self._activations = measure(hosted) if settings.microbatch_bytes else None  # before it is sharded
        backend.wrap(hosted.trained_module)

    def update(self, samples: Iterable[Sample], step: int) -> TrainStats:
        """Update the model with one step's samples (this rank's share of them). All ranks call it together.

        Samples may come while the first of them are trained on, if the backend does not need all ranks in each forward.
        Those without a gradient, whose advantage is 0 or whose tokens do not count, have no backward pass, and none of
        their rows is in another sample's micro-batch; they count in the divisor of the loss. Where micro-batches have
        the same rows as with backward passes of zeros, the gradient has the same bits; where they do not, its sums are
        over other groups of rows, and differ by rounding.
        """
        settings = self._settings
        rate = learning_rate(settings, step, self._num_steps)
        self.backend.set_learning_rate(rate)
        self._hosted.trained_module.train()
        made = _StepBatches()
        passing: Iterable[_Batch] = self._made(samples, made)
        if self.backend.needs_all_batches:
            passing = list(passing)
        normaliser = _NORMALISER
        if not self.backend.scales_gradients:
            normaliser = self._divisor(made)
        gap = norm = 0.0
        for epoch in range(settings.epochs_per_step):
            losses, own = self._backward(passing, normaliser)
            if epoch == 0:
                gap = self._ranks.largest(own.gap if own is not None else 0.0)
                if gap != 0.0 and self.on_gap is not None:
                    self.on_gap(step, gap, own)
            passing = made.learning
            scale = normaliser / self._divisor(made)
            with self._announce_step():
                norm = self.backend.step(scale)
        total = self._ranks.total
        of_a_token = _NORMALISER / max(total(made.num_counted), 1)
        return TrainStats(
            logprob_gap=gap,
            loss=total(sum(item.loss.item() for item in losses)) * scale,
            kl=total(sum(item.kl for item in losses)) * of_a_token,
            clip_fraction=total(sum(item.clip_fraction for item in losses)) * of_a_token,
            grad_norm=norm,
            learning_rate=rate,
            ratios=self._ratios(made.learning),
            num_without_gradient=int(total(made.num_without_gradient)),
            num_unmeasured=int(total(made.num_unmeasured)),
        )

    def _divisor(self, made: _StepBatches) -> int:
        """Return what the sum over all tokens of the step is divided by; 1 where no token of any rank counts."""
        return max(int(self._ranks.total(made.amount)), 1)

    def _ratios(self, batches: Sequence[_Batch]) -> RatioNumbers:
        """Return the numbers of the ratios of all ranks' batches."""
        own, total = [batch.ratios for batch in batches], self._ranks.total
        return RatioNumbers(
            total(sum(one.num for one in own)), total(sum(one.total for one in own)),
            total(sum(one.num_bounded for one in own)), total(sum(one.num_dropped for one in own)),
            self._ranks.largest(max((one.most for one in own), default=0.0)),
        )  # fmt: skip

    def _divided(self, samples: Iterable[Sample]) -> Iterator[Microbatch]:
        """Divide samples into micro-batches, as the settings say."""
        settings = self._settings
        learns = partial(Sample.has_gradient, with_kl=settings.kl_coefficient != 0.0)
        if num := settings.gradient_accumulation_steps:
            return even_microbatches(samples, num, learns)
        limit, cost = settings.num_microbatch_rows, rows_of
        if self._activations is not None:
            limit, cost = settings.num_microbatch_bytes, self._activations.of
        return microbatches(samples, limit or 0, cost, learns, needs_last=self.backend.needs_last)

    def _made(self, samples: Iterable[Sample], into: _StepBatches) -> Iterator[_Batch]:
        """Yield the micro-batches of a step that have a forward; note all in `into`."""
        divisor = SURROGATES[self._settings.loss].divisor
        for part in self._divided(samples):
            packed = pack(part.samples, self._ranks.device, self._hosted.module)
            into.num_counted += int(packed.mask.sum())
            into.amount += amount(divisor, packed.mask, packed.num_answers, self._max_new_tokens)
            if not part.learns and self._settings.skip_forward:
                into.num_unmeasured += len(part.samples)
                continue
            batch = _Batch(
                part.samples,
                packed,
                part.learns,
                part.is_last,
                self._reference_logprobs(packed) if part.learns else None,
            )
            if part.learns:
                into.learning.append(batch)
            else:
                into.num_without_gradient += len(part.samples)
            yield batch

    def _backward(self, batches: Iterable[_Batch], normaliser: int) -> tuple[list[PolicyLoss], SampleGap | None]:
        """Accumulate the gradients of one pass. Returns its losses and the sample with the largest gap in its forwards;
        None: no gap."""
        losses, worst = [], None
        for batch, is_last, is_extra in self._in_turn(batches):
            with self._hosted.training_numerics():
                if not batch.learns:
                    with torch.no_grad():
                        logprobs = self._logprobs(batch.packed)
                else:
                    with self.backend.microbatch(is_last=is_last):
                        logprobs, loss = self._loss(batch, normaliser)
                        # The backend averages over ranks, and the loss is a sum of the ranks' shares.
                        self.backend.backward(loss.loss * (0 if is_extra else self._ranks.num_ranks))
                    if not is_extra:
                        losses.append(loss)
            if not is_extra:
                # Of older weights' tokens, the log-probabilities differ because the weights do.
                gaps = torch.where(batch.packed.is_older, 0.0, logprobs.detach() - batch.packed.logprobs).abs()
                gap, token = (value.item() for value in gaps.max(0))
                if gap != 0.0 and (worst is None or not gap <= worst.gap):
                    worst = SampleGap(gap, batch.samples[bisect(list(accumulate(batch.packed.lengths)), int(token))])
        return losses, worst

    def _in_turn(self, batches: Iterable[_Batch]) -> Iterator[tuple[_Batch, bool, bool]]:
        """Yield each batch, whether it is the last with a backward pass, and whether its numbers do not count.

        Other ranks may have more micro-batches, and their collectives in forward and backward passes need this rank:
        where there are such, all ranks run those without a backward pass first, then the others, as many as any has.
        """
        if not self.backend.talks_in_forward:
            yield from ((batch, batch.is_last, False) for batch in batches)
            return
        own = list(batches)
        for learns in (False, True):
            kind = [batch for batch in own if batch.learns is learns]
            extra = own[-1] if learns else replace(own[-1], learns=False)
            num_forwards = int(self._ranks.largest(len(kind)))
            for index in range(num_forwards):
                is_extra = index >= len(kind)
                batch = extra if is_extra else kind[index]
                self._refuse_other_kind(batch)
                yield batch, learns and index + 1 == num_forwards, is_extra

    def _refuse_other_kind(self, batch: _Batch) -> None:
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

    def _logprobs(self, packed: PackedBatch) -> Tensor:
        """Compute the log-probabilities of a batch's tokens."""
        logits = packed.kept(self.backend.forward(**packed.model_inputs()))
        return selected_logprobs(logits, packed.targets, self._temperature)

    def _loss(self, batch: _Batch, normaliser: int) -> tuple[Tensor, PolicyLoss]:
        """Compute the log-probabilities of a batch's tokens, and its share of the loss."""
        packed, settings = batch.packed, self._settings
        logprobs = self._logprobs(packed)
        bounds = settings.importance_bound, settings.sequence_bound
        if batch.proximal is None:
            batch.proximal = logprobs.detach()
            if any(sample.num_older for sample in batch.samples):
                batch.ratios = ratio_numbers(
                    batch.proximal, packed.logprobs, packed.has_ratio, packed.lengths, *bounds
                )  # fmt: skip
        weights = importance_weights(batch.proximal, packed.logprobs, packed.has_ratio, packed.lengths, *bounds)
        return logprobs, policy_loss(
            logprobs,
            torch.where(packed.is_older, batch.proximal, packed.logprobs),
            packed.advantages * weights,
            packed.mask,
            normaliser,
            *settings.clip_bounds,
            batch.reference,
            settings.kl_coefficient,
            name=settings.loss,
            lengths=packed.lengths,
            sizes=packed.sizes,
            num_counted=_NORMALISER,
            kl_weights=weights,
        )

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor | None:
        """Compute the log-probabilities of the model at the start: a copy, or the base without its adapters."""
        if not self._settings.kl_coefficient:
            return None
        reference = self._reference or self._hosted
        with torch.no_grad(), reference.adapters.switched_off(), reference.training_numerics():
            logits = batch.kept(reference.trained_module(**batch.model_inputs()).logits)
            return selected_logprobs(logits, batch.targets, self._temperature)
