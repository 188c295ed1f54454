"""The engine: requests in, completions out. Its loop is schedule, run, commit."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..kernels.sampling import derive_seed
from .completion import Completion, FinishReason, StreamChunk
from .config import EngineConfig, parse_kv_size
from .detokenizer import IncrementalDetokenizer
from .errors import MemoryReleased, NotIdle, SamplingRefused
from .hosted_model import HostedModel
from .kv_cache import KVCache, plan_kv_pool
from .kv_ledger import KVLedger
from .metrics import Metrics
from .model_runner import ModelRunner
from .request import Request, RequestOptions
from .sampler import Sampler
from .sampling_params import SamplingParams
from .schedule import ScheduleOutput, SequenceResult
from .scheduler import Scheduler, StepLimits
from .sequence import Sequence as TokenSequence
from .sequence_manager import EngineSequenceManager, WorkerSequenceManager

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, object] | None


class Engine:
    """Generates with a hosted causal LM: a transformers module the caller trains, or a folder it loads.

    Example:
        engine = Engine("path/to/model", EngineConfig(kv_cache="512MiB"))
        [completion] = engine.generate(["2 + 2 ="], SamplingParams(max_new_tokens=8))

    A module that is handed over keeps its storage, and belongs to the engine only while a call of it generates, or inside
    `rollout_phase()`. Methods may be called from any thread; one step runs at a time.
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
            tokenizer = tokenizer or _load_tokenizer(Path(model))
        else:
            self.model = HostedModel.adopt(model, **options)
        self.tokenizer = tokenizer
        self.eos_token_ids = _eos_token_ids(self.model.module, tokenizer)
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
        self._mailboxes: dict[str, list[StreamChunk]] = {}  # of requests that some call of ours waits for
        self._num_added = 0
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
        params = _as_params(sampling_params)
        options = options or RequestOptions()
        prompt_ids = self._prompt_ids(prompt)
        if self.tokenizer is None and (params.stop or params.stop_regex):
            raise ValueError("stop strings need a tokenizer, and this engine has none")
        rid = rid or uuid.uuid4().hex
        ids = [rid] if params.n == 1 else [f"{rid}-{index}" for index in range(params.n)]
        with self._lock:
            if taken := [id for id in ids if id in self._sequences]:
                raise ValueError(f"duplicate request ID detected: {', '.join(taken)}")
            now = time.monotonic()
            for index, id in enumerate(ids):
                self._queue(self._request(id, prompt_ids, params, options, index, now))
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
                while not self._all_done(ids):
                    self.step()
            return [self._mailboxes[id][-1].completion for id in ids]  # type: ignore[misc]
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
        ids = await asyncio.to_thread(self._add_all, prompts, sampling_params, options)
        try:
            while not self._all_done(ids):
                await asyncio.to_thread(self._step_unless, lambda: self._all_done(ids))
            return [self._mailboxes[id][-1].completion for id in ids]  # type: ignore[misc]
        finally:
            await asyncio.to_thread(self._let_go, ids)

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk as steps run; each sequence's last chunk carries its completion.

        A caller that stops iterating aborts what is left.
        """
        ids = self._add_all([prompt], sampling_params, options)
        try:
            num_open = len(ids)
            while num_open:
                self._step_unless(lambda: self._has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            self._let_go(ids)

    async def astream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> AsyncIterator[StreamChunk]:
        """As `stream`, for `async for`."""
        ids = await asyncio.to_thread(self._add_all, [prompt], sampling_params, options)
        try:
            num_open = len(ids)
            while num_open:
                await asyncio.to_thread(self._step_unless, lambda: self._has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            await asyncio.to_thread(self._let_go, ids)

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False, message: str | None = None) -> list[str]:
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
            results = self._runner.run(output, self._workers, requests) if output.scheduled else []
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
            if id in self._mailboxes and request.finish_reason is None:
                self._post(request, None)
        completions = [self._answer(self._sequences.request(id)) for id in ended]
        if not self._scheduler.has_work:
            self._ledger.check_idle()
        return completions

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
            self._post(request, completion)
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
            if self._scheduler.num_running:
                raise NotIdle(f"cannot flush: {self._scheduler.num_running} running, {self._scheduler.num_waiting} waiting")
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

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer, and this engine has none: pass token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = list(prompt)
        if not ids:
            raise ValueError("the prompt is empty")
        vocab_size = self.model.vocab_size
        bad = [id for id in ids if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab_size]
        if bad:
            raise ValueError(f"prompt token ids must be integers from 0 to {vocab_size - 1}, not {bad[:5]}")
        return ids

    def _request(
        self, id: str, prompt_ids: list[int], params: SamplingParams, options: RequestOptions, index: int, now: float
    ) -> Request:
        self._num_added += 1
        if params.sampling_seed is None:
            seed = derive_seed(self.config.seed, self._num_added)
        else:
            seed = derive_seed(params.sampling_seed, index)
        detokenizer = IncrementalDetokenizer(self.tokenizer, prompt_ids, params) if self.tokenizer else None
        request = Request(
            TokenSequence(id, prompt_ids), params, options, index, seed, now, self._num_added, detokenizer
        )
        if options.logprob_start_len > len(prompt_ids):
            raise ValueError(f"logprob_start_len {options.logprob_start_len} is beyond the {len(prompt_ids)} prompt tokens")
        if options.logprob_start_len == 0:  # nothing comes before the first token
            request.prompt_logprobs.append(None)
            if options.top_logprobs_num:
                request.prompt_top_logprobs.append(None)
        return request

    def _queue(self, request: Request) -> None:
        self._sequences.add(request)
        self._scheduler.add(request)
        self.metrics.num_requests += 1
        self.metrics.num_prompt_tokens += request.sequence.num_prompt_tokens

    def _add_all(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params], options: RequestOptions | None
    ) -> list[str]:
        prompts = _as_list(prompts)
        params_list = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(params_list) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params_list)} sampling_params")
        ids: list[str] = []
        with self._lock:
            try:
                for prompt, its_params in zip(prompts, params_list, strict=True):
                    ids += self.add(prompt, its_params, options=options)
            except ValueError:
                self._let_go(ids)
                raise
            self._mailboxes.update((id, []) for id in ids)
        return ids

    def _let_go(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more: abort what still runs."""
        with self._lock:
            for id in ids:
                self._mailboxes.pop(id, None)
                if id in self._sequences:
                    self.abort_request(id, message="the caller went away")

    def _step_unless(self, is_done: Callable[[], bool]) -> None:
        with self._lock:
            if not is_done():
                self.step()

    def _all_done(self, ids: list[str]) -> bool:
        return all(box and box[-1].completion is not None for box in map(self._mailboxes.__getitem__, ids))

    def _has_news(self, ids: list[str]) -> bool:
        return any(self._mailboxes[id] for id in ids)

    def _take_news(self, ids: list[str]) -> list[StreamChunk]:
        with self._lock:
            chunks = [chunk for id in ids for chunk in self._mailboxes[id]]
            for id in ids:
                self._mailboxes[id].clear()
            return chunks

    def _post(self, request: Request, completion: Completion | None) -> None:
        """Put what is new of a request into its mailbox."""
        text = completion.text if completion is not None else request.text(final=False)
        first, start = request.num_tokens_streamed, request.num_chars_streamed
        sequence = request.sequence
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + first :])
        if completion is None and not token_ids:
            return
        chunk = StreamChunk(
            request.id, request.index, token_ids, tuple(request.logprobs[first:]), text[start:], completion
        )
        request.num_tokens_streamed += len(token_ids)
        request.num_chars_streamed = max(len(text), start)
        self._mailboxes[request.id].append(chunk)

    def _count(self, request: Request) -> None:
        assert request.finish_reason is not None
        kind = request.finish_reason.type
        self.metrics.num_aborted += kind == "abort"
        self.metrics.num_ignored += kind == "ignored"
        self.metrics.num_finished += kind in ("stop", "length")
        self.metrics.num_cached_tokens += request.num_cached_tokens
        self.metrics.num_output_tokens += request.sequence.num_output_tokens


def _as_params(params: Params) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else SamplingParams.from_dict(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of them, as a list."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    has_one = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return AutoTokenizer.from_pretrained(folder) if has_one else None


def _eos_token_ids(module: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that ends a sequence, by the module's generation config and the tokenizer."""
    configured = getattr(module.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured])
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(id for id in ids if id is not None)
