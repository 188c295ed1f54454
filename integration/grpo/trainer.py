"""The trainer of the main job: one GRPO update with any backend, and its measured gap to the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.sampling.logprobs import selected_logprobs
from ...rollout.model.hosted_model import HostedModel
from ..ranks import Ranks
from .backends.backend import TrainerBackend
from .backends.ddp import DdpBackend
from .backends.deepspeed import DeepSpeedBackend
from .backends.fsdp2 import Fsdp2Backend
from .config import JobConfig
from .loss import PolicyLoss, importance_weights, policy_loss
from .packing import PackedBatch, Sample, microbatches, pack
from .sections import TrainSettings


@dataclass(frozen=True)
class TrainStats:
    """The numbers of one update, over all ranks."""

    logprob_gap: float  # largest |engine - trainer| over the step's tokens that these weights have drawn, before the
    # first optimizer step
    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float


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
    numerics. announce_step: makes a context for the optimizer's step; for an engine that aliases the module, it is
    `RolloutService.optimizer_step`.
    """

    def __init__(
        self,
        hosted: HostedModel,
        backend: TrainerBackend,
        settings: TrainSettings,
        temperature: float,
        ranks: Ranks,
        *,
        announce_step: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.backend = backend
        self._hosted = hosted
        self._settings = settings
        self._temperature = temperature
        self._ranks = ranks
        self._announce_step = announce_step
        self._reference: HostedModel | None = None
        if settings.kl_coefficient and not hosted.adapters:
            frozen = copy.deepcopy(hosted.trained_module).requires_grad_(False).eval()  # before it is sharded
            invariant = hosted.numerics.guarantee is not None
            self._reference = HostedModel.adopt(
                frozen, dtype=None, device=None, invariant=invariant, k_blocks=hosted.k_blocks
            )
        backend.wrap(hosted.trained_module)

    def update(self, samples: Sequence[Sample], step: int) -> TrainStats:
        """Update the model with one step's samples (this rank's share of them). All ranks call it together."""
        num_tokens = int(self._ranks.total(sum(len(s.token_ids) for s in samples)))
        batches = [pack(run, self._ranks.device) for run in microbatches(samples, self._settings.microbatch_tokens)]
        references = [self._reference_logprobs(batch) for batch in batches]
        factor = min(1.0, (step + 1) / self._settings.num_warmup_steps) if self._settings.num_warmup_steps else 1.0
        self.backend.set_learning_rate(self._settings.learning_rate * factor)
        gap = norm = 0.0
        self._hosted.trained_module.train()
        proximal: list[Tensor | None] = [None] * len(batches)
        for epoch in range(self._settings.epochs_per_step):
            losses, epoch_gap = self._backward(batches, references, proximal, num_tokens)
            gap = epoch_gap if epoch == 0 else gap
            with self._announce_step():
                norm = self.backend.step()
        return TrainStats(
            logprob_gap=self._ranks.largest(gap),
            loss=self._ranks.total(sum(item.loss.item() for item in losses)),
            kl=self._ranks.total(sum(item.kl for item in losses)),
            clip_fraction=self._ranks.total(sum(item.clip_fraction for item in losses)),
            grad_norm=norm,
        )

    def _backward(
        self,
        batches: list[PackedBatch],
        references: list[Tensor | None],
        proximal: list[Tensor | None],
        num_tokens: int,
    ) -> tuple[list[PolicyLoss], float]:
        """Accumulate the gradients of one pass. Returns its losses and the largest gap in its forwards.

        proximal: log-probabilities of each batch before the first optimizer step, which the first pass fills in.
        """
        losses, gap = [], 0.0
        num_forwards = len(batches)
        if self.backend.talks_in_forward:
            num_forwards = int(self._ranks.largest(num_forwards))
        for index in range(num_forwards):
            # Other ranks may have more micro-batches, and their collectives need this rank. Its numbers do not count.
            is_extra, at = index >= len(batches), min(index, len(batches) - 1)
            batch, reference = batches[at], references[at]
            with self._hosted.training_numerics(), self.backend.microbatch(is_last=index + 1 == num_forwards):
                logits = self.backend.forward(**batch.model_inputs())[0]
                logprobs = selected_logprobs(logits, batch.targets, self._temperature)
                if (before := proximal[at]) is None:
                    before = proximal[at] = logprobs.detach()
                weights = importance_weights(
                    before, batch.logprobs, batch.is_older, batch.lengths,
                    self._settings.importance_bound, self._settings.sequence_bound,
                )  # fmt: skip
                loss = policy_loss(
                    logprobs,
                    torch.where(batch.is_older, before, batch.logprobs),
                    batch.advantages * weights,
                    torch.ones_like(batch.targets, dtype=torch.bool),
                    num_tokens,
                    self._settings.clip_low,
                    self._settings.clip_high,
                    reference,
                    self._settings.kl_coefficient,
                )
                # The backend averages over ranks, and the loss is a sum of the ranks' shares.
                weight = 0 if is_extra else self._ranks.num_ranks
                self.backend.backward(loss.loss * weight)
            if not is_extra:
                # Of older weights' tokens, the log-probabilities differ because the weights do.
                gaps = torch.where(batch.is_older, 0.0, logprobs.detach() - batch.logprobs)
                gap = max(gap, gaps.abs().max().item())
                losses.append(loss)
        return losses, gap

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor | None:
        """Compute the log-probabilities of the model at the start: a copy, or the base without its adapters."""
        if not self._settings.kl_coefficient:
            return None
        reference = self._reference or self._hosted
        with torch.no_grad(), reference.adapters.switched_off(), reference.training_numerics():
            logits = reference.trained_module(**batch.model_inputs()).logits[0]
            return selected_logprobs(logits, batch.targets, self._temperature)
