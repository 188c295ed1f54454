"""The engine: requests in, completions out, commands between the steps, from any thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from .completion import Completion, FinishReason, StreamChunk
from .config import EngineConfig
from .control.driver import Driver
from .control.inbox import Inbox
from .control.intake import Params, Prompt, prompt_ids
from .control.mailboxes import Mailboxes
from .control.requests import ManyParams, Prompts, RequestDesk
from .control.weights import EngineWeights
from .kv.cache_tree import CacheTree
from .kv.events import KVEventLog
from .kv.pins import PinReport, UnpinReport
from .loop.assemble import assemble, make_runner
from .loop.between_steps import BetweenSteps
from .loop.commands import AbortReport, ContinueReport, EvictReport, FlushReport, PauseMode, PauseReport, check_pause
from .loop.gate import StepGate
from .loop.loop import Loop
from .loop.parts import MakeRunner
from .loop.state import state_report
from .ranks.mesh import Mesh
from .replica.calls import RankCalls
from .replica.follower import End
from .reports.metrics import Metrics
from .reports.sequence_view import SequenceView, views
from .sequences.request import RequestOptions

T = TypeVar("T")


class Engine:
    """Generates with a hosted causal LM: a transformers module the caller trains, or a folder it loads.

    Example:
        engine = Engine("path/to/model", EngineConfig(kv_cache="512MiB"))
        [completion] = engine.generate(["2 + 2 ="], SamplingParams(max_new_tokens=8))

    A module that is handed over keeps its storage, and belongs to the engine only while a call generates or inside
    `engine.model.rollout_phase()`. Every method may be called from any thread. Whoever waits for an answer runs the
    steps, unless `start()` has put a thread there for it.

    Commands run between two steps, with nothing in flight, and their effect holds when they return. `op_id` names one
    so that a repeated one runs once (OpIdTaken where it stands for another); `timeout_s` is how long it may wait to
    begin (DeadlineExceeded). A service around the engine also uses `requests`, `driver` and `weights`; `parts`, `gate`
    and `mailboxes` are the engine's own.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        config: EngineConfig | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mesh: Mesh | None = None,
        make_runner: MakeRunner = make_runner,
    ) -> None:
        """mesh: the ranks that share the model, this one's view; None: as `config.tp` and `config.pp` say, which is a
        collective of the whole torch.distributed job where they make more than one rank. Every rank of a replica makes
        its engine, with the same configuration; one engine at a time may use a mesh. make_runner: what makes the runner
        of its steps, for those who bring their own."""
        self.config = config = config or EngineConfig()
        inbox, self.mailboxes = Inbox(), Mailboxes()
        self.parts = parts = assemble(model, config, tokenizer, mesh, make_runner)
        self.model, self.tokenizer, self.ranks = parts.model, parts.tokenizer, parts.ranks
        self.gate = StepGate(parts, Loop(parts, self.mailboxes, inbox))
        self._between_steps = BetweenSteps(parts, self.gate)
        self.driver = Driver(parts, self.gate, inbox, self.mailboxes)
        self._calls = RankCalls(self.ranks, parts.runner)
        self.requests = RequestDesk(parts, self.driver, inbox, self.mailboxes, self._between_steps, self._calls)
        self.weights = EngineWeights(parts, self.driver, self.gate, self._between_steps)
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
        return self.requests.add(prompt, sampling_params, options, rid)

    def generate(
        self, prompts: Prompts | None, sampling_params: ManyParams = None, *, options: RequestOptions | None = None
    ) -> list[Completion]:
        """Complete every prompt; answers in the order of the prompts, a prompt's n samples side by side.

        prompts: one text, one list of token ids, or a list of either; sampling_params: one for all, or one each.

        All ranks of a replica call this together, unless the others are in `follow`: the controller's prompts count,
        and everybody gets the same completions, or the controller's error. Raises RankFailure on every rank where one
        dies or hangs.
        """
        return self.requests.generate(prompts, sampling_params, options)

    async def agenerate(
        self, prompts: Prompts, sampling_params: ManyParams = None, *, options: RequestOptions | None = None
    ) -> list[Completion]:
        """As `generate`, from a coroutine; calls that run at the same time share their steps."""
        return await self.requests.agenerate(prompts, sampling_params, options)

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk as steps run; each sequence's last chunk carries its completion.

        A caller that stops iterating aborts what is left.
        """
        return self.requests.stream(prompt, sampling_params, options)

    def astream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> AsyncIterator[StreamChunk]:
        """As `stream`, for `async for`."""
        return self.requests.astream(prompt, sampling_params, options)

    # -- replicas of several ranks ----------------------------------------------------------------------------------

    @property
    def is_controller(self) -> bool:
        """Whether this rank takes requests and commands; the others of its replica follow it."""
        return self.ranks.mesh.is_controller

    def follow(self) -> End:
        """At a rank that is not the controller: do what the controller says, until it closes the engine ("closed") or
        calls `dismiss` ("call over"). Raises RankFailure where a rank dies or hangs; idle for hours is no failure."""
        with self.model.rollout_phase():
            return self._calls.follow()

    def dismiss(self) -> None:
        """At the controller: end `follow` on the ranks that are in it, after the step under way."""
        self.ranks.check_controller("dismiss")
        self.driver.drain()
        self._calls.dismiss()

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold KV blocks."""
        return self.parts.scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether there is something to run."""
        return self.driver.has_work

    def step(self) -> list[Completion]:
        """Run one step; returns the sequences that ended since the last one, but for those that another call waits for.

        Runs nothing while paused, or when there is nothing to run; it still returns what an abort has ended.
        """
        self.driver.settle()
        with self.driver.lock:
            self.driver.run_step()
            return self.mailboxes.take_unclaimed()

    def start(self) -> None:
        """Let a thread of the engine's own drive the loop; callers then only wait. Does nothing when started.

        It sleeps while there is nothing to run, while paused, and outside the rollout phase of a trainer's module."""
        self.driver.start()

    def stop(self) -> None:
        """End that thread after the step it is in; live requests stay, and go on with the next who drives."""
        self.driver.stop()

    def wake(self) -> None:
        """Tell a started engine that its module's rollout phase has begun."""
        self.driver.kick()

    def close(self) -> None:
        """Abort what is live and give the KV, the threads and the module back."""
        self.stop()
        if self.is_controller:
            self.abort_request(abort_all=True, message="the engine was closed")
        self._calls.close()
        self.weights.release_kv()
        self._owned_phase.close()
        self.driver.close()
        self.parts.close()

    def between_steps(self, name: str, run: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run something in this thread between two steps, with nothing in flight; returns what it returns."""
        return self.driver.command(name, run, None, timeout_s)

    # -- control ----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self.gate.pause_mode is not None

    @property
    def pause_mode(self) -> PauseMode | None:
        """The mode of the pause that holds now; None: not paused."""
        return self.gate.pause_mode

    def pause_generation(
        self, mode: PauseMode = "retract", *, op_id: str | None = None, timeout_s: float | None = None
    ) -> PauseReport:
        """Run no more steps until `continue_generation`; it holds when the call returns.

        in_place: sequences keep their KV; retract: they give it back, keep tokens and log-probabilities and are
        computed again; abort: all are answered with what they have. Requests that come while paused wait. Raises
        ValueError for another mode, DeadlineExceeded when `timeout_s` passed before it began.
        """
        check_pause(mode)
        pause = self._between_steps.pause
        return self.driver.control("pause_generation", lambda: pause(mode), op_id, timeout_s, mode=mode)

    def continue_generation(self, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End a pause; says so if there was none."""
        return self.driver.control("continue_generation", self._between_steps.resume, op_id, timeout_s)

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
        reason = finished_reason or (FinishReason("abort", message=message) if message else None)
        return self.driver.control(
            "abort_request", lambda: self._between_steps.abort(None if abort_all else rid, reason), op_id, timeout_s,
            rid=rid, abort_all=abort_all, message=message, finished_reason=finished_reason,
        )  # fmt: skip

    def flush_cache(self, *, op_id: str | None = None, timeout_s: float | None = None) -> FlushReport:
        """Empty the prefix cache, and drop every pin, unless sequences hold blocks; however many wait."""
        return self.driver.control("flush_cache", self._between_steps.flush, op_id, timeout_s)

    # -- the prefix cache -------------------------------------------------------------------------------------------

    def pin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        ttl: float | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Keep cached blocks, and those before them, from eviction until they are unpinned as often as pinned.

        ttl: seconds after which these pins lift themselves. Pins end with a flush or a weight commit, or where a
        request could not run for them; never with a request. Hashes that no cached block has count 0; blocks over the
        budget (`EngineConfig.pin_budget`) are refused and counted. Raises ValueError for what is no 64-bit hash, or a
        bad ttl.
        """
        hashes = tuple(hashes)
        return self.driver.control(
            "pin_blocks", lambda: self.parts.ledger.pins.pin(hashes, owner, ttl), op_id, timeout_s,
            hashes=hashes, owner=owner, ttl=ttl,
        )  # fmt: skip

    def unpin_blocks(
        self,
        hashes: Iterable[int],
        owner: str | None = None,
        *,
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> UnpinReport:
        """Lift one pin of this owner on each block; those it has none on count 0."""
        hashes = tuple(hashes)
        return self.driver.control(
            "unpin_blocks", lambda: self.parts.ledger.pins.unpin(hashes, owner), op_id, timeout_s,
            hashes=hashes, owner=owner,
        )  # fmt: skip

    def pin_prefix(
        self,
        prompt: Prompt,
        owner: str | None = None,
        ttl: float | None = None,
        *,
        extra_key: str = "",
        op_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PinReport:
        """Pin the cached blocks of a prompt, text or token ids, from its start as far as they are there.

        The report has their hashes, for `unpin_blocks`; full blocks of the prompt that are not cached are its unknowns.
        """
        ids = prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        return self.driver.control(
            "pin_prefix", lambda: self._between_steps.pin_prefix(ids, extra_key, owner, ttl), op_id, timeout_s,
            token_ids=ids, owner=owner, ttl=ttl, extra_key=extra_key,
        )  # fmt: skip

    def evict_descendants(self, hash: int, *, op_id: str | None = None, timeout_s: float | None = None) -> EvictReport:
        """Free every cached block below this one that no sequence holds and no pin protects."""
        evict = self._between_steps.evict_descendants
        return self.driver.control("evict_descendants", lambda: evict(hash), op_id, timeout_s, hash=hash)

    def cache_tree(
        self,
        depth: int | None = None,
        under: int | None = None,
        *,
        prompt: Prompt | None = None,
        extra_key: str = "",
        timeout_s: float | None = None,
    ) -> CacheTree:
        """The prefix cache as it is between two steps: all of it, or what is below a block, `depth` levels at most.

        With a prompt, text or token ids, it also says which of its blocks is the first that is not cached. Raises
        ValueError for an unknown block or a depth below 1.
        """
        ids = None if prompt is None else prompt_ids(prompt, self.tokenizer, self.model.vocab_size)
        look = self._between_steps.cache_tree
        return self.driver.control("cache_tree", lambda: look(depth, under, ids, extra_key), None, timeout_s)

    @property
    def kv_events(self) -> KVEventLog:
        """What happens in the prefix cache; attach a sink to hear it. Off until one is."""
        return self.parts.ledger.events

    # -- reports ----------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        return self.parts.sequences.weight_version

    @property
    def weight_digest(self) -> str | None:
        return self.parts.sequences.weight_digest

    @property
    def epoch(self) -> int:
        """How many times weights were committed; KV of an earlier epoch never matches a prefix again."""
        return self.parts.ledger.epoch

    @property
    def refusal(self) -> str | None:
        """Why no step may run though generation is not paused; None: it may."""
        return self.gate.refusal

    @property
    def is_started(self) -> bool:
        """Whether a thread of the engine's own drives the loop."""
        return self.driver.is_started

    @property
    def failure(self) -> Exception | None:
        """What ended the loop that `start` had begun; None: nothing did."""
        return self.driver.failure

    @property
    def max_model_len(self) -> int:
        return self.parts.max_model_len

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool now; 0 while it is released."""
        return self.parts.kv_cache.num_bytes

    @property
    def metrics(self) -> Metrics:
        return self.parts.reports.metrics

    def state(self) -> dict[str, object]:
        """What is where, as plain values. Changes nothing."""
        return self.driver.look(lambda: state_report(self.parts, self.gate))

    def live_sequences(self, num_newest: int = 16, limit: int | None = None) -> list[SequenceView]:
        """Who runs, then who waits, each in order, `limit` of each at most. Changes nothing.

        num_newest: how many tokens of its end each shows. Raises ValueError for a negative number.
        """
        scheduler = self.parts.scheduler
        return self.driver.look(lambda: views(scheduler.running(), scheduler.waiting(), num_newest, limit))

    def check_integrity(self) -> None:
        """Sum up the block ledger block by block. Raises LedgerError naming what is wrong."""
        self.driver.look(self.parts.ledger.check)
