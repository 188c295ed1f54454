"""The engine: requests in, completions out. Its loop is schedule, run, commit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .completion import Completion, FinishReason, StreamChunk
from .config import EngineConfig, parse_kv_size
from .errors import MemoryReleased, NotIdle, SamplingRefused
from .hosted_model import HostedModel
from .intake import Intake, Params, Prompt, as_params, as_prompts, find_eos_token_ids, load_tokenizer
from .kv_cache import KVCache, plan_kv_pool
from .kv_ledger import KVLedger
from .mailboxes import Mailboxes
from .metrics import Metrics
from .model_runner import ModelRunner
from .request import Request, RequestOptions
from .sampler import Sampler
from .schedule import ScheduleOutput, SequenceResult
from .scheduler import Scheduler, StepLimits
from .sequence_manager import EngineSequenceManager, WorkerSequenceManager

logger = logging.getLogger(__name__)


class Engine:
    """Generates with a hosted causal LM: a transformers module the caller trains, or a folder it loads.

    Example:
        engine = Engine("path/to/model", EngineConfig(kv_cache="512MiB"))
        [completion] = engine.generate(["2 + 2 ="], SamplingParams(max_new_tokens=8))

    A module that is handed over keeps its storage, and belongs to the engine only while a call generates or inside
    `engine.model.rollout_phase()`. Methods may be called from any thread; one step runs at a time.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
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
        )
        logger.info("KV pool: %d blocks of %d tokens, %.1f MiB (%s)", self.kv_plan.num_blocks, config.block_size,
                    self.kv_plan.num_bytes / 2**20, self.kv_plan.reason)
        self._kv_cache = KVCache(self.kv_plan, self.model.kv_shapes, config.block_size, self.model.device)
        self._ledger = KVLedger(self.kv_plan.num_blocks, config.block_size, config.prefix_cache)
        limits = StepLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.chunked_prefill_size or config.max_num_batched_tokens,
            self.max_model_len,
        )
        self._scheduler = Scheduler(self._ledger, limits, config.policy)
        self._sequences = EngineSequenceManager(self.eos_token_ids, self.max_model_len)
        self._workers = WorkerSequenceManager()
        self._sampler = Sampler(self.eos_token_ids)
        self._runner = ModelRunner(self.model, self._kv_cache, self._sampler, config.block_size)
        self.metrics = Metrics()
        self._lock = threading.RLock()
        self._mailboxes = Mailboxes()
        self._intake = Intake(tokenizer, self.model.vocab_size, config.seed)
        self._stepper = ThreadPoolExecutor(1, "lockstep-step")  # runs the steps that coroutines wait for
        self._turn: Future[list[Completion]] | None = None  # the latest of them
        self._turn_lock = threading.Lock()
        self._refusal: str | None = None  # why no step may run; a weight commit lifts it
        self._owned_phase = ExitStack()
        if self.model.owned:
            self._owned_phase.enter_context(self.model.rollout_phase())

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        *,
        rid: str | None = None,
        options: RequestOptions | None = None,
    ) -> list[str]:
        """Queue one prompt, text or token ids; returns the ids of its n sequences, to be found in `step()`'s answers.

        Raises ValueError for a bad prompt or setting, or an id that a live request has; then nothing is queued.
        """
        params = as_params(sampling_params)
        rid = rid or uuid.uuid4().hex
        ids = [rid] if params.n == 1 else [f"{rid}-{index}" for index in range(params.n)]
        with self._lock:
            if taken := [id for id in ids if id in self._sequences]:
                raise ValueError(f"duplicate request ID detected: {', '.join(taken)}")
            for request in self._intake.requests(prompt, params, options, ids):
                self._queue(request)
        return ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """Complete every prompt; answers in the order of the prompts, a prompt's n samples side by side.

        prompts: one text, one list of token ids, or a list of either; sampling_params: one for all, or one each.
        """
        ids = self._add_all(prompts, sampling_params, options)
        try:
            with self.model.rollout_phase():
                while not self._mailboxes.all_done(ids):
                    self.step()
            return self._mailboxes.completions(ids)
        finally:
            self._let_go(ids)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """As `generate`, from a coroutine; calls that run at the same time share their steps."""
        ids = await self._add_all_async(prompts, sampling_params, options)
        try:
            while not self._mailboxes.all_done(ids):
                await self._shared_step()
            return self._mailboxes.completions(ids)
        finally:
            await asyncio.to_thread(self._let_go, ids)

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk as steps run; each sequence's last chunk carries its completion.

        A caller that stops iterating aborts what is left.
        """
        ids = self._add_all([prompt], sampling_params, options, streamed=True)
        try:
            num_open = len(ids)
            while num_open:
                self._step_unless(lambda: self._mailboxes.has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            self._let_go(ids)

    async def astream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> AsyncIterator[StreamChunk]:
        """As `stream`, for `async for`."""
        ids = await self._add_all_async([prompt], sampling_params, options, streamed=True)
        try:
            num_open = len(ids)
            while num_open:
                if not self._mailboxes.has_news(ids):
                    await self._shared_step()
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            await asyncio.to_thread(self._let_go, ids)

    def abort_request(
        self, rid: str | None = None, *, abort_all: bool = False, message: str | None = None
    ) -> list[str]:
        """End live requests, with what they have so far; returns the ids that were. An unknown id is no error."""
        with self._lock:
            requests = [r for r in self._sequences.requests() if abort_all or r.id == rid]
            for request in requests:
                self._sequences.finish(request.id, FinishReason("abort", message=message or "aborted"))
                self._answer(request)
            return [request.id for request in requests]

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> list[Completion]:
        """Run one step; returns the sequences it finished. Does nothing when there is nothing to run."""
        with self._lock, self.model.rollout_phase():
            if not self._scheduler.has_work:
                return []
            if not self._kv_cache.is_allocated:
                raise MemoryReleased("the KV pool is released: resume it before generating")
            if self._refusal is not None:
                raise SamplingRefused(self._refusal)
            started = time.perf_counter()
            output = self._scheduler.schedule()
            self._sequences.on_schedule(output)
            self._workers.on_schedule(output)
            requests = {item.id: self._sequences.request(item.id) for item in output.scheduled}
            with ExitStack() as undo:
                undo.callback(self._undo_schedule, output, requests)
                results = self._runner.run(output, self._workers, requests) if output.scheduled else []
                undo.pop_all()
            completions = self._commit(output, results, requests)
            self.metrics.num_steps += 1
            self.metrics.num_rows += output.num_tokens
            self.metrics.step_seconds += time.perf_counter() - started
            return completions

    def _commit(
        self, output: ScheduleOutput, results: list[SequenceResult], requests: dict[str, Request]
    ) -> list[Completion]:
        """Take a step's results: states, KV, answers, streams."""
        ended = [id for id, _ in (*output.ignored, *output.exhausted)]
        ended += self._sequences.on_step_completed(results)
        self._workers.on_step_completed(results)
        self._scheduler.on_step_completed(output, requests)
        self.metrics.num_retractions += len(output.preempted)
        for id, request in requests.items():
            if request.finish_reason is None and self._mailboxes.wants_chunks(id):
                self._mailboxes.post(request, None)
        completions = [self._answer(self._sequences.request(id)) for id in ended]
        if not self._scheduler.has_work:
            self._ledger.check_idle()
        return completions

    def _undo_schedule(self, output: ScheduleOutput, requests: dict[str, Request]) -> None:
        """The forward failed or was interrupted: nobody stays half in the step. What it ended is answered, what it was
        to run waits again, as after a preemption."""
        for id, _ in (*output.ignored, *output.exhausted):
            self._answer(self._sequences.request(id))
        for id, request in requests.items():
            self._sequences.preempt(id)
            self._workers.preempt(id)
            self._scheduler.retract(request)
        self.metrics.num_retractions += len(output.preempted) + len(requests)

    def _answer(self, request: Request) -> Completion:
        """The request has ended: give everything back and answer it, once."""
        completion = request.completion(self.weight_version, self.weight_digest)
        self._scheduler.remove(request)
        self._sampler.forget(request)
        self._sequences.free(request.id)
        if request.id in self._workers:
            self._workers.free(request.id)
        self._count(request)
        if request.id in self._mailboxes:
            self._mailboxes.post(request, completion)
        return completion

    # -- weights, KV and state --------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        return self._sequences.weight_version

    @property
    def weight_digest(self) -> str | None:
        return self._sequences.weight_digest

    @property
    def epoch(self) -> int:
        """How many times weights were committed; KV of an earlier epoch never matches a prefix again."""
        return self._ledger.epoch

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once."""
        return self.model.resident_tensors()

    def commit_weights(self, version: str, digest: str | None) -> int:
        """From here on tokens are sampled from weights of this version; starts a KV epoch.

        version and digest are opaque here. Returns the number of cached blocks that were dropped. Running sequences go
        on, on their KV.
        """
        with self._lock:
            self._sequences.weight_version, self._sequences.weight_digest = version, digest
            self._refusal = None
            self.metrics.num_weight_commits += 1
            return self._ledger.start_epoch()

    def refuse_sampling(self, why: str) -> None:
        """Run no step until the next weight commit: the weights may be torn. `why` is what a step raises."""
        with self._lock:
            self._refusal = why

    def set_weight_digest(self, digest: str) -> None:
        """The digest of the version that is committed, computed later. Starts no epoch."""
        with self._lock:
            self._sequences.weight_digest = digest

    def flush_cache(self) -> int:
        """Drop every cached prefix; returns the number of blocks freed. Raises NotIdle while sequences run."""
        with self._lock:
            if num_running := self._scheduler.num_running:
                raise NotIdle(f"cannot flush: {num_running} running, {self._scheduler.num_waiting} waiting")
            return self._ledger.flush()

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences run."""
        with self._lock:
            self.flush_cache()
            num_bytes = self._kv_cache.num_bytes
            self._kv_cache.release()
            return num_bytes

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes. Does nothing when it is there."""
        with self._lock:
            self._kv_cache.allocate()
            return self._kv_cache.num_bytes

    def state(self) -> dict[str, object]:
        """What is where, as plain values. Changes nothing."""
        with self._lock:
            usage = self._ledger.usage
            return {
                "num_running": self._scheduler.num_running,
                "num_waiting": self._scheduler.num_waiting,
                "running_ids": [r.id for r in self._scheduler.running()],
                "waiting_ids": [r.id for r in self._scheduler.waiting()],
                "num_blocks": usage.num_blocks,
                "num_free_blocks": usage.num_free,
                "num_cached_blocks": usage.num_cached,
                "num_held_blocks": usage.num_held,
                "kv_bytes": self._kv_cache.num_bytes,
                "num_forwards": self._runner.num_forwards,
                "weight_version": self.weight_version,
                "weight_digest": self.weight_digest,
                "epoch": self.epoch,
                "numerics": self.model.numerics.describe(),
                "metrics": self.metrics.as_dict(),
            }

    def check_integrity(self) -> None:
        """Sum up the block ledger block by block. Raises LedgerError naming what is wrong."""
        with self._lock:
            self._ledger.check()

    def close(self) -> None:
        """Abort what is live and give the KV and the module back."""
        with self._lock:
            self.abort_request(abort_all=True, message="the engine was closed")
            self.release_kv()
            self._owned_phase.close()
        self._stepper.shutdown()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _queue(self, request: Request) -> None:
        self._sequences.add(request)
        self._scheduler.add(request)
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += request.sequence.num_prompt_tokens

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params],
        options: RequestOptions | None,
        *,
        streamed: bool = False,
    ) -> list[str]:
        prompts = as_prompts(prompts)
        params_list = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(params_list) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params_list)} sampling_params")
        ids: list[str] = []
        with self._lock:
            with ExitStack() as undo:  # one bad prompt, and none is queued
                undo.callback(self._let_go, ids)
                for prompt, its_params in zip(prompts, params_list, strict=True):
                    ids += self.add(prompt, its_params, options=options)
                undo.pop_all()
            self._mailboxes.open(ids, streamed=streamed)
        return ids

    async def _add_all_async(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params],
        options: RequestOptions | None,
        *,
        streamed: bool = False,
    ) -> list[str]:
        adding = asyncio.ensure_future(asyncio.to_thread(self._add_all, prompts, params, options, streamed=streamed))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:  # a thread cannot be stopped: let go of what it queues
            with suppress(ValueError):
                await asyncio.to_thread(self._let_go, await adding)
            raise

    async def _shared_step(self) -> None:
        """One step, on a thread of the engine's own.

        Coroutines that want one at the same time get the same one, or each would wait for as many as there are others.
        """
        with self._turn_lock:
            if self._turn is None or self._turn.done():
                self._turn = self._stepper.submit(self.step)
            turn = self._turn
        await asyncio.shield(asyncio.wrap_future(turn))

    def _let_go(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more: abort what still runs."""
        with self._lock:
            for id in ids:
                self._mailboxes.close(id)
                if id in self._sequences:
                    self.abort_request(id, message="the caller went away")

    def _step_unless(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            if not is_done():
                self.step()

    def _take_news(self, ids: list[str]) -> list[StreamChunk]:
        with self._lock:
            return self._mailboxes.take(ids)

    def _count(self, request: Request) -> None:
        assert request.finish_reason is not None
        kind = request.finish_reason.type
        self.metrics.num_aborted += kind == "abort"
        self.metrics.num_ignored += kind == "ignored"
        self.metrics.num_finished += kind in ("stop", "length")
        self.metrics.num_cached_tokens += request.num_cached_tokens
        self.metrics.num_output_tokens += request.sequence.num_output_tokens

