"""What an engine is made of, and what can be done to it between two steps. Its caller holds the engine's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..completion import Completion, FinishReason
from ..config import EngineConfig, parse_kv_size
from ..errors import MemoryReleased, NotIdle, SamplingRefused
from ..grammars.catalog import Grammars
from ..kv.cache_tree import CacheTree, cache_tree
from ..kv.ledger import KVLedger
from ..kv.pins import PinReport
from ..kv.prefix import Prefix
from ..kv.tensors import KVCache, KVPlan, plan_kv_pool
from ..model.hosted_model import HostedModel
from ..model.tokenizer import find_eos_token_ids, load_tokenizer
from ..ranks.channel import RankChannel
from ..replica.controller import ReplicaRunner
from ..replica.stage import Stage
from ..reports.latencies import Latencies
from ..reports.metrics import Metrics
from ..reports.trace import Trace
from ..running.decode_graphs import DecodeGraphs, decode_ladder, why_not_recorded
from ..running.model_runner import ModelRunner
from ..running.recorders import PlainCalls
from ..running.runner import Runner
from ..running.sampler import Sampler
from ..scheduling.pipelining import Pipelining
from ..scheduling.scheduler import Scheduler, StepLimits
from ..sequences.engine_manager import EngineSequenceManager
from ..sequences.event_log import ManagerPair
from ..sequences.request import Request
from ..sequences.sequence import State
from .commands import (
    AbortReport,
    CommitReport,
    ContinueReport,
    EvictReport,
    FlushReport,
    HoldReport,
    PauseMode,
    PauseReport,
)
from .grammar_steps import GrammarSteps
from .loop import Loop

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
        ranks: RankChannel,
    ) -> None:
        options = {"dtype": config.dtype, "device": config.device, "invariant": config.invariant,
                   "k_blocks": config.k_blocks, "mesh": ranks.mesh}  # fmt: skip
        self.ranks = ranks
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
        self.kv_plan = self._agreed(self.kv_plan, config)
        logger.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s)", self.kv_plan.num_blocks, config.block_size,
                    self.kv_plan.num_bytes / 2**20, self.kv_plan.reason)  # fmt: skip
        self._kv_cache = KVCache(self.kv_plan, self.model.kv_shapes, config.block_size, self.model.device)
        self.ledger = KVLedger(
            self.kv_plan.num_blocks, config.block_size, config.prefix_cache, pin_budget=config.pin_budget
        )
        chunk = config.chunked_prefill_size or config.max_num_batched_tokens
        limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens, chunk, self.max_model_len)
        self.metrics = Metrics()
        self.latencies = Latencies()
        self.trace = Trace(config.trace)
        self._runner = self._make_runner(config)
        self.scheduler = Scheduler(
            self.ledger, limits, config.policy, deadline_multiplier=config.deadline_multiplier,
            min_deadline_s=config.min_deadline_s, admission_ratio=config.admission_ratio,
            pipelining=Pipelining(self._runner.num_stages, config.sequence_pipelining),
        )  # fmt: skip
        self.sequences = EngineSequenceManager(self.eos_token_ids, self.max_model_len, self._runner.num_stages)
        self.managers = ManagerPair(self.sequences, self._runner.workers, self._runner.on_event)
        self._on_answer = on_answer
        self.grammars = Grammars(
            tokenizer, self.model.vocab_size, self.eos_token_ids, mode=config.jump_forward,
            any_whitespace=config.grammar_any_whitespace, max_grammars=config.max_grammars,
            max_rollback=config.jump_forward_max_rollback,
        )  # fmt: skip
        grammar_steps = GrammarSteps(
            self.scheduler, self.managers, self.ledger, limits, config.jump_forward_max_blocks, self.metrics, self.trace
        )
        self.loop = Loop(
            self.scheduler, self.managers, self.ledger, self._runner, self.metrics, self.latencies, self.trace,
            grammar_steps,
            overlap=config.overlap, on_token=on_token, on_answer=self._answered, is_interrupted=is_interrupted,
        )  # fmt: skip
        self.pause_mode: PauseMode | None = None  # None: not paused
        self.refusals: dict[str, str] = {}  # why no step may run, by what has to happen first
        self.before_sampling: Callable[[], None] | None = None  # to be called, and to set None, before the next step

    def _make_runner(self, config: EngineConfig) -> Runner:
        """What runs the steps. Everything that it needs of the engine is there."""
        sampler = Sampler(self.eos_token_ids)
        if self.ranks.mesh.num_ranks > 1:
            self.stage = Stage(self.ranks, self.model, self._kv_cache, sampler, config.block_size, self.trace)
            return ReplicaRunner(self.ranks, self.stage, self.metrics, config.state_check_steps)
        return ModelRunner(
            self.model, self._kv_cache, sampler, config.block_size, self.trace, overlap=config.overlap,
            graphs=self._make_graphs(config), begins_ahead=self._begins_ahead(config),
        )  # fmt: skip

    def _begins_ahead(self, config: EngineConfig) -> bool:
        """Whether decode steps are begun before the last one is known, where there are graphs. A CPU gains nothing by
        it, and loses the rows of sequences that have ended: it does so only where its sizes were asked for."""
        return self.model.device.type == "cuda" or config.cuda_graph_batch_sizes is not None

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """What replays decode steps, where that is asked for or of use."""
        asked = config.cuda_graph_batch_sizes
        sizes = decode_ladder(asked, config.max_num_seqs, self.model.device)
        if not sizes:
            return None
        recorder = None
        if (why := why_not_recorded(self.model)) is not None:
            if asked is not None and self.model.device.type == "cuda":
                raise ValueError(f"cuda_graph_batch_sizes={list(asked)}, but no decode step can be recorded: {why}")
            logger.info("decode steps are not recorded: %s", why)
            if asked is None:
                return None
            recorder = PlainCalls()
        width = -(-self.max_model_len // config.block_size)
        return DecodeGraphs(self.model, self._kv_cache, sizes, width, recorder)

    def _agreed(self, plan: KVPlan, config: EngineConfig) -> KVPlan:
        """The same pool on every rank of the replica: as many blocks as the rank with the least memory has room for.

        Raises ValueError naming the settings that ranks were not given alike."""
        said = self.ranks.gather_json([plan.num_blocks, {**asdict(config), "max_model_len": self.max_model_len}])
        first = said[0][1]
        differing = sorted({key for _, settings in said for key in settings if settings[key] != first[key]} - {"trace"})
        if differing:
            raise ValueError(f"the ranks of a replica need the same configuration: {', '.join(differing)} differ")
        least = min(num_blocks for num_blocks, _ in said)
        return plan if least == plan.num_blocks else replace(plan, num_blocks=least, reason="as another rank has room")

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
        is_free = self.pause_mode is None and self.refusal is None and self.before_sampling is None
        has_memory = self._kv_cache.is_allocated and self.model.holds_weights
        return is_free and has_memory and self.loop.has_work

    @property
    def refusal(self) -> str | None:
        """Why no step may run though nothing is paused; None: it may."""
        return "; ".join(self.refusals.values()) or None

    def step(self) -> None:
        """Run one step. Nothing runs while paused, nor before `before_sampling` was called.

        Raises MemoryReleased or SamplingRefused where there is work that must not run now.
        """
        if self.pause_mode is not None or self.before_sampling is not None or not self.loop.has_work:
            return
        if not self._kv_cache.is_allocated:
            raise MemoryReleased("the KV pool is released: resume it before generating")
        if not self.model.holds_weights:
            raise MemoryReleased("the weights are released: resume them, and write them, before generating")
        if self.refusal is not None:
            raise SamplingRefused(self.refusal)
        try:
            self.loop.step()
        finally:
            self.ledger.events.flush()

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
        self.metrics.num_pauses += 1
        if isinstance(self._runner, ReplicaRunner):
            self._runner.check_states()
        return PauseReport(mode, self.scheduler.num_running, self.scheduler.num_waiting, num_retracted, num_aborted)

    def resume(self) -> ContinueReport:
        """Let steps run again."""
        was_paused, self.pause_mode = self.pause_mode is not None, None
        return ContinueReport(was_paused, self.scheduler.num_running, self.scheduler.num_waiting)

    def abort_all(self, reason: FinishReason | None) -> list[str]:
        """End every live request; returns their ids. reason: None names what the abort found."""
        requests = self.sequences.requests()
        for request in requests:
            self.loop.abort(request, reason or _aborted(request))
        return [request.id for request in requests]

    def abort(self, rid: str, reason: FinishReason | None) -> AbortReport:
        """End the request of that id, or all samples of the one whose id it is the base of."""
        found = [r for r in self.sequences.requests() if rid in (r.id, r.base_id)]
        for request in found:
            self.loop.abort(request, reason or _aborted(request))
        return AbortReport(tuple(r.id for r in found), () if found else (rid,))

    def flush(self) -> FlushReport:
        """Empty the prefix cache and reset what is counted from it, unless sequences hold blocks."""
        if num_running := self.scheduler.num_running:
            why = f"{num_running} running, {self.scheduler.num_waiting} waiting: finish, retract or abort them first"
            return FlushReport(False, 0, why)
        self._runner.num_forwards = 0
        self.scheduler.reset_admission()
        num_blocks, num_unpinned = self.ledger.flush()
        return FlushReport(True, num_blocks, "", num_unpinned)

    def pin_prefix(self, token_ids: list[int], extra_key: str, owner: str | None, ttl: float | None) -> PinReport:
        """Pin what is cached of a prompt; the full blocks that are not count as unknown."""
        num_blocks = len(token_ids) // self.ledger.block_size
        path = self.ledger.path_of(Prefix(token_ids, self.ledger.block_size, extra_key), num_blocks)
        report = self.ledger.pins.pin([node.hash for node in path], owner, ttl)
        return replace(report, num_unknown=num_blocks - len(path))

    def evict_descendants(self, hash: int) -> EvictReport:
        """Free what is below a block, but for what is held or pinned."""
        node = self.ledger.cache.get(hash)
        if node is None:
            return EvictReport(False, 0, 0, 0)
        self.ledger.pins.expire()
        num_evicted = self.ledger.evict_below(node)
        left = list(self.ledger.cache.below(node))
        num_held = sum(n.num_holders > 0 for n in left)
        return EvictReport(True, num_evicted, num_held, len(left) - num_held)

    def cache_tree(self, depth: int | None, under: int | None, prompt: list[int] | None, extra_key: str) -> CacheTree:
        """The prefix cache as it is now."""
        size = self.ledger.block_size
        if prompt is None:
            return cache_tree(self.ledger, depth, under)
        return cache_tree(self.ledger, depth, under, Prefix(prompt, size, extra_key), len(prompt) // size)

    def hold(
        self,
        refusal: tuple[str, str] | None,
        before_sampling: Callable[[], None] | None,
        abort_all: bool,
        keep_running: bool,
    ) -> HoldReport:
        """Run no further step, for weights to be written: refuse them under this key and for this reason, or until
        `before_sampling` was called. Raises NotIdle, and changes nothing but what it aborted, where that would pull
        the weights from under requests."""
        reason = FinishReason("abort", message="aborted by a weight update")
        num_aborted = len(self.abort_all(reason)) if abort_all else 0
        num_running, num_waiting = self.scheduler.num_running, self.scheduler.num_waiting
        num_hit = num_running + num_waiting if self.pause_mode is None else 0 if keep_running else num_running
        if num_hit:
            raise NotIdle(
                f"{num_running} requests are running and {num_waiting} waiting: abort them (abort_all_requests=True) "
                'or take their KV back first (pause_generation(mode="retract")); paused in_place they can go on with '
                "the new weights (keep_running=True)"
            )
        if refusal is not None:
            self.refusals.update([refusal])
        if before_sampling is not None:
            self.before_sampling = before_sampling
        return HoldReport(num_aborted, num_running, num_waiting)

    def commit_weights(
        self, version: str, digest: str | None, lift: Iterable[str], refuse: Mapping[str, str]
    ) -> CommitReport:
        """A new weight version; starts a KV epoch, lifts refusals by key, and takes up others."""
        self.sequences.weight_version, self.sequences.weight_digest = version, digest
        lifted = {key: self.refusals.pop(key) for key in lift if key in self.refusals}
        self.refusals.update(refuse)
        self.metrics.num_weight_commits += 1
        report = CommitReport(*self.ledger.start_epoch(), lifted)
        self.scheduler.forget_under_way()
        return report

    @property
    def kv_bytes(self) -> int:
        return self._kv_cache.num_bytes

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        report = self.flush()
        if not report.success:
            raise NotIdle(f"cannot release the KV pool: {report.error_msg}")
        num_bytes = self._kv_cache.num_bytes
        if isinstance(self._runner, ModelRunner):
            self._runner.release_memory()
        self._kv_cache.release()
        return num_bytes

    def relabel_weights(self, version: str) -> None:
        """The same weights under another version; starts no epoch."""
        self.sequences.weight_version = version

    def release_weights(self) -> int:
        """Give the weights' memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        if num_running := self.scheduler.num_running:
            raise NotIdle(f"cannot release the weights: {num_running} running: finish, retract or abort them first")
        return self.model.release_weights()

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
            "holds_weights": self.model.holds_weights,
            "weight_bytes": self.model.weight_bytes,
            "num_running": scheduler.num_running,  # RUNNING and PAUSED: they hold blocks
            "num_waiting": scheduler.num_waiting,
            "num_waiting_tokens": sum(r.sequence.num_tokens for r in scheduler.waiting()),
            "running_ids": [r.id for r in scheduler.running()],
            "waiting_ids": [r.id for r in scheduler.waiting()],
            "num_blocks": usage.num_blocks,
            "num_free_blocks": usage.num_free,
            "num_cached_blocks": usage.num_cached,
            "num_held_blocks": usage.num_held,
            "num_pinned_blocks": usage.num_pinned,
            "num_pins": len(self.ledger.pins),
            "num_expired_pins": self.ledger.pins.num_expired,
            "num_auto_unpinned": self.ledger.pins.num_auto_unpinned,
            "num_evicted_blocks": self.ledger.cache.num_evicted,
            "eviction_pressure": self.ledger.eviction_pressure,
            "num_looked_up_tokens": self.ledger.num_looked_up_tokens,
            "num_hit_tokens": self.ledger.num_hit_tokens,
            "kv_bytes": self.kv_bytes,
            "num_forwards": self._runner.num_forwards,
            "admission_ratio": scheduler.admission_ratio,
            "weight_version": self.sequences.weight_version,
            "weight_digest": self.sequences.weight_digest,
            "epoch": self.ledger.epoch,
            "last_throughput": self.loop.last_throughput,
            "num_grammars": len(self.grammars.cache),
            "num_grammars_compiled": self.grammars.cache.num_compiled,
            "grammar_compile_seconds": self.grammars.cache.compile_seconds,
            "numerics": self.model.numerics.describe(),
            "metrics": self.metrics.as_dict(),
        }


def _aborted(request: Request) -> FinishReason:
    """Why a request ended that somebody aborted without a word: SGLang's messages."""
    has_begun = request.sequence.state is not State.WAITING
    return FinishReason("abort", message="Aborted" if has_begun else "Abort in waiting queue")
