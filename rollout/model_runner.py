"""Runs one step: batch, forward, sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .batch import Batch, build_batch
from .hosted_attention import StepContext
from .hosted_model import HostedModel
from .kv_cache import KVCache
from .request import Request
from .sampler import Sampler
from .schedule import ScheduleOutput, SequenceResult
from .sequence_manager import WorkerSequenceManager
from .step_results import results_of


class ModelRunner:
    """The rank's share of a step. It reads what the worker manager knows and writes KV."""

    def __init__(self, model: HostedModel, kv_cache: KVCache, sampler: Sampler, block_size: int) -> None:
        self._model, self._kv_cache, self._sampler, self._block_size = model, kv_cache, sampler, block_size
        self.num_forwards = 0

    def prepare(
        self, output: ScheduleOutput, workers: WorkerSequenceManager, requests: Mapping[str, Request]
    ) -> Batch:
        """The step's tensors. Reads the managers, which `run` does not: it may run on another thread."""
        return build_batch(output, workers, requests, self._block_size, self._model.device)

    @torch.inference_mode()
    def run(self, output: ScheduleOutput, batch: Batch) -> list[SequenceResult]:
        """Run the scheduled rows; one result per scheduled sequence, in order."""
        context = StepContext(batch.slots, batch.paged, self._kv_cache.keys, self._kv_cache.values)
        # A step of mid-prompt chunks needs no logits; the module wants at least one row to make them for.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        logits = self._model.forward(batch.token_ids, batch.positions, rows, context)
        self.num_forwards += 1
        return results_of(output, batch, logits, self._sampler)
