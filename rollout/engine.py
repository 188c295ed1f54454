"""The engine: requests in, completions out, commands between the steps, from any thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .commands import AbortReport, CommandLog, ContinueReport, FlushReport, PauseMode, PauseReport, check_pause_mode
from .completion import Completion, FinishReason, StreamChunk
from .config import EngineConfig
from .core import EngineCore
from .errors import EngineStopped
from .event_log import Event
from .fair_lock import FairLock
from .intake import Intake, Params, Prompt, as_params, as_prompts
from .kv_cache import KVPlan
from .mailboxes import Mailboxes
from .metrics import Metrics
from .request import Request, RequestOptions

logger = logging.getLogger(__name__)


class Engine:
    """Generates with a hosted causal LM: a transformers module the caller trains, or a folder it loads.

    Example:
        engine = Engine("path/to/model", EngineConfig(kv_cache="512MiB"))
        [completion] = engine.generate(["2 + 2 ="], SamplingParams(max_new_tokens=8))

    A module that is handed over keeps its storage, and belongs to the engine only while a call generates or inside
    `engine.model.rollout_phase()`. Every method may be called from any thread. Whoever waits for an answer runs the
    steps, unless `start()` has put a thread there for it.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self._mailboxes = Mailboxes()
        self._unclaimed: list[Completion] = []  # answers that no mailbox is there for: `step` returns them
        self._num_commands_waiting = 0  # for the lock
        self._core = EngineCore(
            model, config, tokenizer, self._on_token, self._on_answer, lambda: self._num_commands_waiting > 0
        )
        self.model = self._core.model
        self.tokenizer = self._core.tokenizer
        self._intake = Intake(self.tokenizer, self.model.vocab_size, config.seed)
        self._lock = FairLock()
        self._wake = threading.Condition(self._lock)  # type: ignore[arg-type]
        self._inbox: dict[str, Request] = {}  # added, not yet taken up: adding never waits for a step
        self._inbox_lock = threading.Lock()
        self._kick = threading.Event()  # something has changed that the loop's thread may wait for
        self._commands = CommandLog()
        self._stepper = ThreadPoolExecutor(1, "lockstep-step")  # runs the steps that coroutines wait for
        self._turn: Future[None] | None = None  # the latest of them
        self._turn_lock = threading.Lock()
        self._thread: threading.Thread | None = None  # drives the loop, once started
        self._failure: Exception | None = None  # what ended the thread
        self.model.before_phase_ends = self._drain
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
        with self._inbox_lock:
            requests = self._make_requests(prompt, sampling_params, options, rid)
            self._inbox.update((request.id, request) for request in requests)
        self._kick.set()
        return [request.id for request in requests]

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
                self._wait_until(lambda: self._mailboxes.all_done(ids))
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
                await self._progress(lambda: self._mailboxes.all_done(ids))
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
                self._wait_until(lambda: self._mailboxes.has_news(ids))
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
                    await self._progress(lambda: self._mailboxes.has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            await asyncio.to_thread(self._let_go, ids)

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is something to run."""
        return bool(self._inbox) or self._core.loop.has_work

    def step(self) -> list[Completion]:
        """Run one step; returns the sequences that ended since the last one, but for those that another call waits for.

        Runs nothing while paused, or when there is nothing to run; it still returns what an abort has ended.
        """
        with self._lock:
            self._run_step()
            answers, self._unclaimed = self._unclaimed, []
            return answers

    def _run_step(self) -> None:
        with self._wake, self.model.rollout_phase():
            self._take_inbox()
            try:
                self._core.step()
            finally:
                self._wake.notify_all()

    def start(self) -> None:
        """Let a thread of the engine's own drive the loop; callers then only wait. Does nothing when started.

        It sleeps while there is nothing to run, while paused, and outside the rollout phase of a trainer's module."""
        with self._lock:
            if self._thread is None:
                self._failure = None
                self._thread = threading.Thread(target=self._drive, name="lockstep-loop", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End that thread after the step it is in; live requests stay, and go on with the next who drives."""
        with self._wake:
            thread, self._thread = self._thread, None
            self._kick.set()
            self._wake.notify_all()
        if thread is not None:
            thread.join()

    def _drive(self) -> None:
        me = threading.current_thread()
        try:
            while self._thread is me:
                self._kick.clear()  # before the look: what changes after it is seen the next time
                with self._wake:
                    self._take_inbox()
                    if is_ready := self._core.can_step and self.model.in_rollout_phase and self._thread is me:
                        self._core.step()
                        self._wake.notify_all()
                if not is_ready:
                    self._kick.wait()
        except Exception as error:
            logger.exception("the loop has ended")
            with self._wake:
                self._failure, self._thread = error, None
                self._wake.notify_all()

    # -- commands ---------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._core.pause_mode is not None

    def pause_generation(
        self, mode: PauseMode = "retract", *, op_id: str | None = None, timeout_s: float | None = None
    ) -> PauseReport:
        """Run no more steps until `continue_generation`; it holds when the call returns.

        in_place: sequences keep their KV; retract: they give it back, keep tokens and log-probabilities and are
        computed again; abort: all are answered with what they have. Requests that come while paused wait. Raises
        ValueError for another mode, DeadlineExceeded when `timeout_s` passed before it began.
        """
        check_pause_mode(mode)
        return self._command("pause_generation", lambda: self._core.pause(mode), op_id, timeout_s)

    def continue_generation(self, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End a pause; says so if there was none."""
        return self._command("continue_generation", self._core.resume, op_id, timeout_s)

    def abort_request(
        self,
        rid: str | None = None,
        *,
        abort_all: bool = False,
        message: str | None = None,
        finished_reason: FinishReason | None = None,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AbortReport:
        """End a live request, or all, with what they have so far; `rid` is exact, or the base of n samples.

        An id that is not live is reported, not an error. Raises ValueError when neither is named.
        """
        if rid is None and not abort_all:
            raise ValueError("abort_request needs a rid, or abort_all")
        reason = finished_reason or FinishReason("abort", message=message or "aborted")

        def abort() -> AbortReport:
            if abort_all:
                return AbortReport(tuple(self._core.abort_all(reason)), ())
            return self._core.abort(rid, reason)

        return self._command("abort_request", abort, op_id, timeout_s)

    def flush_cache(self, *, op_id: str | None = None, timeout_s: float | None = None) -> FlushReport:
        """Empty the prefix cache, unless sequences hold blocks; however many wait."""
        return self._command("flush_cache", self._core.flush, op_id, timeout_s)

    def _command(
        self, name: str, run: Callable[[], Any], op_id: str | None = None, timeout_s: float | None = None
    ) -> Any:
        """Run something between two steps, with nothing in flight; the same op_id runs once."""

        def drained() -> Any:
            with self._core.trace.span(name):
                self._take_inbox()
                self._core.loop.drain()
                return run()

        command, is_new = self._commands.submit(name, drained, op_id, timeout_s)
        if is_new:
            with self._inbox_lock:
                self._num_commands_waiting += 1
            seconds = command.seconds_left
            has_lock = self._lock.acquire(timeout=-1 if seconds is None else seconds)
            with self._inbox_lock:
                self._num_commands_waiting -= 1
            if has_lock:
                try:
                    command.execute()
                    self._wake.notify_all()
                finally:
                    self._lock.release()
                self._kick.set()
            else:
                command.give_up()
        return command.reply.result()

    # -- weights, KV and state --------------------------------------------------------------------------------------

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._core.eos_token_ids

    @property
    def max_model_len(self) -> int:
        return self._core.max_model_len

    @property
    def kv_plan(self) -> KVPlan:
        return self._core.kv_plan

    @property
    def metrics(self) -> Metrics:
        return self._core.metrics

    @property
    def weight_version(self) -> str:
        return self._core.sequences.weight_version

    @property
    def weight_digest(self) -> str | None:
        return self._core.sequences.weight_digest

    @property
    def epoch(self) -> int:
        """How many times weights were committed; KV of an earlier epoch never matches a prefix again."""
        return self._core.ledger.epoch

    @property
    def log_events(self) -> list[Event] | None:
        """Where the managers' events are recorded, for `event_log.replay`; None: nowhere."""
        return self._core.managers.log

    @log_events.setter
    def log_events(self, log: list[Event] | None) -> None:
        self._core.managers.log = log

    def resident_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The weights by Hugging Face name, tied ones once."""
        return self.model.resident_tensors()

    def commit_weights(self, version: str, digest: str | None) -> int:
        """From here on tokens are sampled from weights of this version; starts a KV epoch.

        version and digest are opaque here. Returns the number of cached blocks that were dropped. Running sequences go
        on, on their KV.
        """
        return self._command("commit_weights", lambda: self._core.commit_weights(version, digest))

    def refuse_sampling(self, why: str) -> None:
        """Run no step until the next weight commit: the weights may be torn. `why` is what a step raises."""

        def refuse() -> None:
            self._core.refusal = why

        self._command("refuse_sampling", refuse)

    def set_weight_digest(self, digest: str) -> None:
        """The digest of the version that is committed, computed later. Starts no epoch."""
        with self._lock:
            self._core.sequences.weight_digest = digest

    def release_kv(self) -> int:
        """Give the KV pool's memory back; returns its bytes. Raises NotIdle while sequences hold blocks."""
        return self._command("release_kv", self._core.release_kv)

    def resume_kv(self) -> int:
        """Allocate the KV pool again; returns its bytes. Does nothing when it is there."""
        return self._command("resume_kv", self._core.resume_kv)

    def state(self) -> dict[str, object]:
        """What is where, as plain values. Changes nothing."""
        with self._lock:
            self._take_inbox()
            return self._core.state()

    def check_integrity(self) -> None:
        """Sum up the block ledger block by block. Raises LedgerError naming what is wrong."""
        with self._lock:
            self._core.ledger.check()

    def wake(self) -> None:
        """Tell a started engine that its module's rollout phase has begun."""
        self._kick.set()

    def close(self) -> None:
        """Abort what is live and give the KV, the threads and the module back."""
        self.stop()
        self.abort_request(abort_all=True, message="the engine was closed")
        self.release_kv()
        self._owned_phase.close()
        self._stepper.shutdown()
        self._core.loop.close()
        self._core.trace.close()

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _on_token(self, request: Request) -> None:
        if self._mailboxes.wants_chunks(request.id):
            self._mailboxes.post(request, None)

    def _on_answer(self, request: Request, completion: Completion) -> None:
        if request.id in self._mailboxes:
            self._mailboxes.post(request, completion)
        else:
            self._unclaimed.append(completion)

    def _drain(self) -> None:
        """The rollout phase ends: the step that runs is finished first."""
        with self._lock:
            self._core.loop.drain()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Return when `is_done()`; drives the loop meanwhile where no thread does."""
        self._kick.set()  # the rollout phase may have begun with this call
        while not self._wait_a_step(is_done):
            pass

    def _wait_a_step(self, is_done: Callable[[], bool]) -> bool:
        """Run one step, or wait until something happens where somebody else runs them; returns `is_done()` before."""
        with self._wake:
            if is_done():
                return True
            if self._failure is not None:
                raise EngineStopped("the engine's loop has ended") from self._failure
            if self._thread is None and not self.is_paused:
                self._run_step()
            else:
                if self._thread is None:
                    logger.warning("paused (%s): waiting for continue_generation", self._core.pause_mode)
                self._wake.wait()
            return False

    async def _progress(self, is_done: Callable[[], bool]) -> None:
        """From a coroutine: let a step happen.

        Coroutines that want one at the same time get the same one, or each would wait for as many as there are others.
        """
        if self._thread is not None:
            await asyncio.to_thread(self._wait_until, is_done)
            return
        with self._turn_lock:
            if self._turn is None or self._turn.done():
                self._turn = self._stepper.submit(self._wait_a_step, lambda: False)
            turn = self._turn
        await asyncio.shield(asyncio.wrap_future(turn))

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
        with self._inbox_lock:
            requests: list[Request] = []  # one bad prompt, and none is queued
            for prompt, its_params in zip(prompts, params_list, strict=True):
                requests += self._make_requests(prompt, its_params, options, None)
            ids = [request.id for request in requests]
            self._mailboxes.open(ids, streamed=streamed)
            self._inbox.update(zip(ids, requests, strict=True))
        self._kick.set()
        return ids

    def _make_requests(
        self, prompt: Prompt, params: Params, options: RequestOptions | None, rid: str | None
    ) -> list[Request]:
        params = as_params(params)
        rid = rid or uuid.uuid4().hex
        ids = [rid] if params.n == 1 else [f"{rid}-{index}" for index in range(params.n)]
        if taken := [id for id in ids if id in self._inbox or id in self._core.sequences]:
            raise ValueError(f"duplicate request ID detected: {', '.join(taken)}")
        requests = self._intake.requests(prompt, params, options, ids)
        for request in requests:
            request.base_id = rid
        return requests

    def _take_inbox(self) -> None:
        """Queue what was added. The caller holds the lock."""
        with self._inbox_lock:
            for request in self._inbox.values():
                self._core.queue(request)
            self._inbox.clear()

    async def _add_all_async(self, *args: Any, streamed: bool = False) -> list[str]:
        adding = asyncio.ensure_future(asyncio.to_thread(self._add_all, *args, streamed=streamed))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:  # a thread cannot be stopped: let go of what it queues
            with suppress(ValueError):
                await asyncio.to_thread(self._let_go, await adding)
            raise

    def _let_go(self, ids: Iterable[str]) -> None:
        """Nobody waits for these any more: abort what still runs."""
        with self._lock:
            self._take_inbox()
            for id in [id for id in ids if id in self._core.sequences]:
                self._mailboxes.open([id], streamed=False)  # its answer is nobody's
                self.abort_request(id, message="the caller went away")
            for id in ids:
                self._mailboxes.close(id)

    def _take_news(self, ids: list[str]) -> list[StreamChunk]:
        with self._lock:
            return self._mailboxes.take(ids)
