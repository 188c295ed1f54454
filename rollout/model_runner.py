"""Runs steps on one rank that has the whole model: batch, forward, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
from .trace import Trace


class ModelRunner:
    """The runner of one rank. It reads what the worker manager knows and writes KV.

    With `overlap` steps run on a thread of its own, one after another, and `launch` returns at once.
    """

    num_stages = 1
    on_event = None

    def __init__(
        self, model: HostedModel, kv_cache: KVCache, sampler: Sampler, block_size: int, trace: Trace, *, overlap: bool
    ) -> None:
        self._model, self._kv_cache, self._sampler, self._block_size = model, kv_cache, sampler, block_size
        self._trace = trace
        self._thread = ThreadPoolExecutor(1, "lockstep-model") if overlap else None
        self.workers = WorkerSequenceManager(self.num_stages)
        self.num_forwards = 0

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> LaunchedStep:
        """Run the step, or give it to the thread. The managers are read here, and nowhere else."""
        batch = build_batch(output, self.workers, requests, self._block_size, self._model.device)
        size = {"rows": output.num_tokens, "sequences": len(output.scheduled)}
        launched = time.perf_counter()

        def run() -> list[SequenceResult]:
            with self._trace.span("forward", since=launched, step=output.step, **size):
                return self._run(output, batch)

        if self._thread is not None:
            return LaunchedStep(self._thread.submit(run).result)
        results = run()
        return LaunchedStep(lambda: results)

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    @torch.inference_mode()
    def _run(self, output: ScheduleOutput, batch: Batch) -> list[SequenceResult]:
        context = StepContext(batch.slots, batch.paged, self._kv_cache.keys, self._kv_cache.values)
        # A step of mid-prompt chunks needs no logits; the module wants at least one row to make them for.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        logits = self._model.forward(batch.token_ids, batch.positions, rows, context)
        self.num_forwards += 1
        return results_of(output, batch, logits, self._sampler)


@dataclass(frozen=True)
class LaunchedStep:
    """A step on the only stage there is."""

    results: Callable[[], list[SequenceResult]]

    def wait_first_stage(self) -> None:
        self.results()

    def abandon(self) -> None:
        """Who is launched next waits for its turn, and nobody keeps what comes of this step."""
