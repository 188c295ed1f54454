"""Runs one step: batch, forward, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from .batch import Batch, build_batch
from .completion import ListedLogprobs, TopLogprobs
from .hosted_attention import StepContext
from .hosted_model import HostedModel
from .kv_cache import KVCache
from .request import Request
from .sampler import Sampled, Sampler, prompt_listed_logprobs, prompt_logprobs
from .schedule import ScheduledSequence, ScheduleOutput, SequenceResult
from .sequence_manager import WorkerSequenceManager


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the prompt tokens that follow the rows asked for."""

    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    listed_logprobs: tuple[ListedLogprobs, ...] = ()


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
        sampled = self._sample(batch, logits)
        scored = self._score_prompts(batch, logits)
        return [_result(item, sampled.get(item.id), scored.get(item.id)) for item in output.scheduled]

    def _sample(self, batch: Batch, logits: torch.Tensor) -> dict[str, Sampled]:
        if not batch.sampled:
            return {}
        choices = self._sampler.sample(logits[: len(batch.sampled)], batch.sampled)
        return {request.id: choice for request, choice in zip(batch.sampled, choices, strict=True)}

    def _score_prompts(self, batch: Batch, logits: torch.Tensor) -> dict[str, PromptScores]:
        scored, first = {}, len(batch.sampled)
        for rows in batch.prompts:
            token_ids = rows.request.sequence.token_ids[rows.first_token : rows.first_token + rows.num_rows]
            ids = torch.tensor(token_ids, device=logits.device)
            its_logits = logits[first : first + rows.num_rows]
            scored[rows.request.id] = PromptScores(
                *prompt_logprobs(its_logits, ids, rows.request), prompt_listed_logprobs(its_logits, rows.request)
            )
            first += rows.num_rows
        return scored


def _result(item: ScheduledSequence, sampled: Sampled | None, scored: PromptScores | None) -> SequenceResult:
    scores = scored or PromptScores()
    result = SequenceResult(
        item.id,
        item.incarnation,
        item.num_tokens,
        prompt_logprobs=scores.logprobs,
        prompt_top_logprobs=scores.top_logprobs,
        prompt_listed_logprobs=scores.listed_logprobs,
    )
    if sampled is None:
        return result
    return replace(
        result,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        top_logprobs=sampled.top_logprobs,
        listed_logprobs=sampled.listed_logprobs,
    )
