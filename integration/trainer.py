"""The trainer of the main job: one GRPO update of a DDP model, and the measurement of its gap to the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..kernels.sampling import selected_logprobs
from ..rollout.hosted_model import HostedModel
from .grpo_loss import PolicyLoss, policy_loss
from .job_config import TrainSettings
from .packing import PackedBatch, Sample, microbatches, pack
from .ranks import Ranks
from .service import RolloutService


@dataclass(frozen=True)
class TrainStats:
    """One update, over all ranks."""

    logprob_gap: float  # largest |engine - trainer| over the step's sampled tokens, before the first optimizer step
    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float


class GrpoTrainer:
    """Owns the optimizer and the DDP wrapper around the module that the engine hosts."""

    def __init__(
        self, model: PreTrainedModel, service: RolloutService, settings: TrainSettings, temperature: float, ranks: Ranks
    ) -> None:
        self.model = model
        self._service = service
        self._settings = settings
        self._temperature = temperature
        self._ranks = ranks
        device_ids = [ranks.device] if ranks.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(model, device_ids=device_ids)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self._reference: HostedModel | None = None
        if settings.kl_coefficient:
            frozen = copy.deepcopy(model).requires_grad_(False).eval()
            self._reference = HostedModel.adopt(
                frozen, dtype=None, device=None, invariant=service.engine.config.invariant
            )

    def update(self, samples: Sequence[Sample], step: int) -> TrainStats:
        """Learn from one step's samples (this rank's share of them). Every rank calls it together."""
        num_tokens = int(self._ranks.total(sum(len(s.token_ids) for s in samples)))
        batches = [pack(run, self._ranks.device) for run in microbatches(samples, self._settings.microbatch_tokens)]
        references = [self._reference_logprobs(batch) for batch in batches]
        factor = min(1.0, (step + 1) / self._settings.num_warmup_steps) if self._settings.num_warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * factor
        gap = 0.0
        self.model.train()
        for epoch in range(self._settings.epochs_per_step):
            losses, epoch_gap = self._backward(batches, references, num_tokens)
            gap = epoch_gap if epoch == 0 else gap
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
            with self._service.optimizer_step():
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return TrainStats(
            logprob_gap=self._ranks.largest(gap),
            loss=self._ranks.total(sum(item.loss.item() for item in losses)),
            kl=self._ranks.total(sum(item.kl for item in losses)),
            clip_fraction=self._ranks.total(sum(item.clip_fraction for item in losses)),
            grad_norm=float(norm),
        )

    def _backward(
        self, batches: list[PackedBatch], references: list[Tensor | None], num_tokens: int
    ) -> tuple[list[PolicyLoss], float]:
        """Accumulate the gradients of one pass; returns its losses and the largest gap seen in its forwards."""
        losses, gap = [], 0.0
        for index, (batch, reference) in enumerate(zip(batches, references, strict=True)):
            is_last = index == len(batches) - 1  # gradients travel between ranks once, with the last micro-batch
            with self._service.training_numerics(), nullcontext() if is_last else self._ddp.no_sync():
                logits = self._ddp(**batch.model_inputs()).logits[0]
                logprobs = selected_logprobs(logits, batch.targets, self._temperature)
                loss = policy_loss(
                    logprobs,
                    batch.logprobs,
                    batch.advantages,
                    torch.ones_like(batch.targets, dtype=torch.bool),
                    num_tokens,
                    self._settings.clip_low,
                    self._settings.clip_high,
                    reference,
                    self._settings.kl_coefficient,
                )
                (loss.loss * self._ranks.num_ranks).backward()  # DDP averages over ranks; the shares are summed
            gap = max(gap, (logprobs.detach() - batch.logprobs).abs().max().item())
            losses.append(loss)
        return losses, gap

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad(), self._reference.training_numerics():
            logits = self._reference.module(**batch.model_inputs()).logits[0]
            return selected_logprobs(logits, batch.targets, self._temperature)
