"""What an engine is made of, and what can be done to it between two steps. Its caller holds the engine's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from .commands import AbortReport, ContinueReport, FlushReport, PauseMode, PauseReport
from .completion import Completion, FinishReason
from .config import EngineConfig, parse_kv_size
from .errors import MemoryReleased, NotIdle, SamplingRefused
from .event_log import ManagerPair
from .hosted_model import HostedModel
from .intake import find_eos_token_ids, load_tokenizer
from .kv_cache import KVCache, plan_kv_pool
from .kv_ledger import KVLedger
from .loop import Loop
from .metrics import Metrics
from .model_runner import ModelRunner
from .request import Request
from .sampler import Sampler
from .scheduler import Scheduler, StepLimits
from .sequence_manager import EngineSequenceManager, WorkerSequenceManager
from .trace import Trace

logger = logging.getLogger(__name__)


class EngineCore:
    """Model, KV, scheduler, managers and loop of one engine."""

    def __init__(
        self,
        model: nn.Module | str | Path,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        on_token: Callable[[Request], None],
        on_answer: Callable[[Request, Completion], None],
        is_interrupted: Callable[[], bool],
    ) -> None:
        options = {"dtype": config.dtype, "device": config.device, "invariant": config.invariant}
        if isinstance(model, str | Path):
            self.model = HostedModel.load(model, **options)
            tokenizer = tokenizer or load_tokenizer(Path(model))
        else:
            self.model = HostedModel.adopt(model, **options)
        self.tokenizer = tokenizer
        self.eos_token_ids = find_eos_token_ids(self.model.module, tokenizer)
        self.max_model_len = min(config.max_model_len or self.model.max_model_len, self.model.max_model_len)
        self.kv_plan = plan_kv_pool(
            parse_kv_size(config.kv_cache), self.model.kv_shapes, config.block_size, config.max_num_seqs,
            self.max_model_len, self.model.device,
        )  # fmt: skip
        logger.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s)", self.kv_plan.num_blocks, config.block_size,
                    self.kv_plan.num_bytes / 2**20, self.kv_plan.reason)  # fmt: skip
        self._kv_cache = KVCache(self.kv_plan, self.model.kv_shapes, config.block_size, self.model.device)
        self.ledger = KVLedger(self.kv_plan.num_blocks, config.block_size, config.prefix_cache)
        chunk = config.chunked_prefill_size or config.max_num_batched_tokens
        limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens, chunk, self.max_model_len)
        self.scheduler = Scheduler(
            self.ledger, limits, config.policy, deadline_multiplier=config.deadline_multiplier,
            min_deadline_s=config.min_deadline_s, admission_ratio=config.admission_ratio,
        )  # fmt: skip
        self.sequences = EngineSequenceManager(self.eos_token_ids, self.max_model_len)
        self.managers = ManagerPair(self.sequences, WorkerSequenceManager())
        sampler = Sampler(self.eos_token_ids)
        self._runner = ModelRunner(self.model, self._kv_cache, sampler, config.block_size)
        self.metrics = Metrics()
        self.trace = Trace(config.trace)
        self._on_answer = on_answer
        self.loop = Loop(
            self.scheduler, self.managers, self.ledger, self._runner, sampler, self.metrics, self.trace,
            overlap=config.overlap, on_token=on_token, on_answer=self._answered, is_interrupted=is_interrupted,
        )  # fmt: skip
        self.pause_mode: PauseMode | None = None  # None: not paused
        self.refusal: str | None = None  # why no step may run; a weight commit lifts it

    # -- requests and steps -----------------------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """Take up a request. Its id must not be live."""
        self.managers.add(request)
        self.scheduler.add(request)
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += request.sequence.num_prompt_tokens
        self.trace.instant("request", id=request.id, prompt_tokens=request.sequence.num_prompt_tokens)

    @property
    def can_step(self) -> bool:
        """Whether a step would run something now."""
        is_free = self.pause_mode is None and self.refusal is None and self._kv_cache.is_allocated
        return is_free and self.loop.has_work

    def step(self) -> None:
        """Run one step. Nothing runs while paused.

        Raises MemoryReleased or SamplingRefused where there is work that must not run now.
        """
        if self.pause_mode is not None or not self.loop.has_work:
            return
        if not self._kv_cache.is_allocated:
            raise MemoryReleased("the KV pool is released: resume it before generating")
        if self.refusal is not None:
            raise SamplingRefused(self.refusal)
        self.loop.step()

    def _answered(self, request: Request, completion: Completion) -> None:
        assert request.finish_reason is not None
        kind = request.finish_reason.type
        self.metrics.num_aborted += kind == "abort"
        self.metrics.num_ignored += kind == "ignored"
        self.metrics.num_finished += kind in ("stop", "length")
        self.metrics.num_cached_tokens += request.num_cached_tokens
        self.metrics.num_output_tokens += request.sequence.num_output_tokens
        self._on_answer(request, completion)

    # -- commands: nothing is in flight while they run --------------------------------------------------------------

    def pause(self, mode: PauseMode) -> PauseReport:
        """Stop the steps. in_place: everybody keeps their KV; retract: everybody gives it back and waits; abort:
        everybody is answered with what they have. Any pause may follow any other."""
        running = self.scheduler.running()
        num_retracted = num_aborted = 0
        if mode == "retract":
            # The newest first: requests that are queued again stand in order of arrival whatever order they come in.
            for request in reversed(running):
                self.loop.retract(request)
            num_retracted = len(running)
        elif mode == "abort":
            num_aborted = len(self.abort_all(FinishReason("abort", message="aborted by a pause")))
        self.pause_mode = mode
        return PauseReport(mode, self.scheduler.num_running, self.scheduler.num_waiting, num_retracted, num_aborted)

    def resume(self) -> ContinueReport:
        """Let steps run again."""
        was_paused, self.pause_mode = self.pause_mode is not None, None
        return ContinueReport(was_paused, self.scheduler.num_running, self.scheduler.num_waiting)

    def abort_all(self, reason: FinishReason) -> list[str]:
        """End every live request; returns their ids."""
        requests = self.sequences.requests()
        for request in requests:
            self.loop.abort(request, reason)
        return [request.id for request in requests]

    def abort(self, rid: str, reason: FinishReason) -> AbortReport:
        """End the request of that id, or all samples of the one whose id it is the base of."""
        found = [r for r in self.sequences.requests() if rid in (r.id, r.base_id)]
        for request in found:
            self.loop.abort(request, reason)
        return AbortReport(tuple(r.id for r in found), () if found else (rid,))

    def flush(self) -> FlushReport:
        """Empty the prefix cache and reset what is counted from it, unless sequences hold blocks."""
        if num_running := self.scheduler.num_running:
            why = f"{num_running} running, {self.scheduler.num_waiting} waiting: finish, retract or abort them first"
            return FlushReport(False, 0, why)
        self._runner.num_forwards = 0
        self.scheduler.reset_admission()
        return FlushReport(True, self.ledger.flush(), "")

    def commit_weights(self, version: str, digest: str | None) -> int:
        """A new weight version; starts a KV epoch. Returns the number of cached blocks dropped."""
        self.sequences.weight_version, self.sequences.weight_digest = version, digest
        self.refusal = None
        self.metrics.num_weight_commits += 1
        return self.ledger.start_epoch()

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        report = self.flush()
        if not report.success:
            raise NotIdle(f"cannot release the KV pool: {report.error_msg}")
        num_bytes = self._kv_cache.num_bytes
        self._kv_cache.release()
        return num_bytes

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes."""
        self._kv_cache.allocate()
        return self._kv_cache.num_bytes

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        """What is where, as plain values. Changes nothing."""
        usage, scheduler = self.ledger.usage, self.scheduler
        return {
            "paused": self.pause_mode is not None,
            "pause_mode": self.pause_mode,
            "refusal": self.refusal,
            "num_running": scheduler.num_running,  # RUNNING and PAUSED: they hold blocks
            "num_waiting": scheduler.num_waiting,
            "running_ids": [r.id for r in scheduler.running()],
            "waiting_ids": [r.id for r in scheduler.waiting()],
            "num_blocks": usage.num_blocks,
            "num_free_blocks": usage.num_free,
            "num_cached_blocks": usage.num_cached,
            "num_held_blocks": usage.num_held,
            "num_pinned_blocks": 0,
            "kv_bytes": self._kv_cache.num_bytes,
            "num_forwards": self._runner.num_forwards,
            "admission_ratio": scheduler.admission_ratio,
            "weight_version": self.sequences.weight_version,
            "weight_digest": self.sequences.weight_digest,
            "epoch": self.ledger.epoch,
            "last_throughput": self.loop.last_throughput,
            "numerics": self.model.numerics.describe(),
            "metrics": self.metrics.as_dict(),
        }
