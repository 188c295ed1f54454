"""The engine: it turns requests into completions and runs commands between steps, for any thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from .completion import Completion, FinishReason, StreamChunk
from .config import EngineConfig
from .control.cache_commands import CacheCommands
from .control.desk.inbox import Inbox
from .control.desk.intake import Params, Prompt
from .control.desk.mailboxes import Mailboxes
from .control.desk.requests import RequestDesk
from .control.desk.waiting import ManyOptions, ManyParams, Prompts, WaitingCalls
from .control.drafts import EngineDrafts
from .control.driver import Driver
from .control.weights import EngineWeights
from .loop.assemble import assemble, make_runner
from .loop.between_steps import BetweenSteps
from .loop.commands import AbortReport, ContinueReport, PauseMode, PauseReport, check_pause
from .loop.gate import StepGate
from .loop.loop import Loop
from .loop.parts import MakeRunner
from .loop.state import state_report, with_waiting
from .one_process import OfOneProcess
from .ranks.mesh import Mesh
from .replica.calls import End, RankCalls
from .reports.metrics import Metrics
from .reports.sequence_view import SequenceView, views
from .request_options import RequestOptions

T = TypeVar("T")


class Engine(CacheCommands, OfOneProcess):
    """Generate with a hosted causal LM: a transformers module that the caller trains, or a folder of weights.

    Example:
        engine = Engine("path/to/model", EngineConfig(kv_cache="512MiB"))
        [completion] = engine.generate(["2 + 2 ="], SamplingParams(max_new_tokens=8))

    A caller's module keeps its storage, and is the engine's only during a call that generates, or inside
    `engine.model.rollout_phase()`. Any thread may call every method. A caller that waits for an answer runs the steps
    itself, unless `start()` has begun a thread for them. An engine cannot be pickled or copied.

    Commands run between two steps, with no step in flight, and their effect holds when they return. A command repeated
    under its `op_id` runs once (OpIdTaken for an id that names another call); `timeout_s` limits its wait to begin
    (DeadlineExceeded). `drafts` has draft sources and history. A service also uses `requests`, `waiting`, `driver` and
    `weights`, metrics and benchmarks `parts`. `gate` and `mailboxes` are internal.
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
        """Host the model and allocate its KV. Every rank of a replica does so, with the same configuration.

        mesh: this rank's view of the ranks that share the model; one engine at a time may use it. None: built from
        `config.tp` and `config.pp`; for more than one rank this is a collective of the whole torch.distributed job.
        make_runner: makes the runner of the engine's steps. Raises ValueError for settings that do not fit.
        """
        self.config = config = config or EngineConfig()
        inbox = Inbox()
        self.mailboxes = Mailboxes(inbox.lock)
        self.parts = parts = assemble(model, config, tokenizer, mesh, make_runner)
        self.model, self.tokenizer, self.ranks = parts.model, parts.tokenizer, parts.ranks
        self.gate = StepGate(parts, Loop(parts, self.mailboxes, inbox))
        self._between_steps = BetweenSteps(parts, self.gate)
        self.driver = Driver(parts, self.gate, inbox, self.mailboxes)
        self._calls = RankCalls(self.ranks, parts.runner)
        self._between_steps.give_way = self.driver.give_way
        self.requests = RequestDesk(parts, self.driver, inbox, self.mailboxes, self._between_steps)
        self.waiting = WaitingCalls(parts, self.driver, self.requests, self.mailboxes, self._calls)
        self.drafts = EngineDrafts(parts, self.driver)
        self.weights = EngineWeights(parts, self.driver, self.gate, self._between_steps)
        self._owned_phase = ExitStack()
        if self.model.owned:
            self._owned_phase.enter_context(self.model.rollout_phase())

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(
        self, prompt: Prompt, sampling_params: Params = None, *, rid: str | None = None,
        options: RequestOptions | None = None,
    ) -> list[str]:  # fmt: skip
        """Queue one prompt, text or token ids; returns the ids of its n sequences. `step()` returns their completions.
        Raises ValueError for a bad prompt or setting, or an id that a live request has; then nothing is queued."""
        return self.requests.add(prompt, sampling_params, options, rid)

    def generate(
        self, prompts: Prompts | None, sampling_params: ManyParams = None, *, options: ManyOptions = None
    ) -> list[Completion]:
        """Complete every prompt; returns the answers in the order of the prompts, a prompt's n samples side by side.

        prompts: one text, one list of token ids, or a list of either; sampling_params, options: one for all or each.
        All ranks of a replica call this together, unless the others are in `follow`: the controller's prompts count,
        and every rank gets the same completions, or the controller's error. Raises RankFailure on all ranks if one of
        them ends or hangs, EngineStopped where the engine is closed, here or by the controller.
        """
        return self.waiting.generate(prompts, sampling_params, options)

    def renew(self, completions: Completion | Sequence[Completion]) -> list[Completion]:
        """Return the answers that `generate` gives now to the same requests, bit for bit, as `WaitingCalls.renew`."""
        return self.waiting.renew(completions)

    async def agenerate(
        self, prompts: Prompts, sampling_params: ManyParams = None, *, options: ManyOptions = None
    ) -> list[Completion]:
        """Complete every prompt as `generate` does, in a coroutine. Calls that run at the same time share steps."""
        return await self.waiting.agenerate(prompts, sampling_params, options)

    def stream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk as steps run; a sequence's last chunk has its completion. Abort the
        request when the caller stops iterating. Outside a phase each step begins one, of a trainer's module."""
        return self.waiting.stream(prompt, sampling_params, options)

    def astream(
        self, prompt: Prompt, sampling_params: Params = None, *, options: RequestOptions | None = None
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt as `stream` does, for `async for`."""
        return self.waiting.astream(prompt, sampling_params, options)

    # -- replicas of several ranks ----------------------------------------------------------------------------------

    @property
    def is_controller(self) -> bool:
        """Whether this rank takes requests and commands; the others of its replica follow it."""
        return self.ranks.mesh.is_controller

    def follow(self) -> End:
        """Follow the controller, on any other rank, until it closes the engine ("closed") or calls `dismiss` ("call
        over"). Raises RankFailure if a rank ends or hangs; being idle for hours is no failure."""
        with self.model.rollout_phase():
            return self._calls.follow()

    def dismiss(self) -> None:
        """End `follow` on the other ranks after the current step, and the next one on a rank that does not follow yet.
        Called on the controller."""
        self.ranks.check_controller("dismiss")
        self.driver.drain()
        self._calls.dismiss()

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """The number of sequences that hold KV blocks."""
        return self.parts.scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or a step's output is not delivered yet; `step` may have answers even so."""
        return self.driver.has_work

    def step(self, most: int = 1) -> list[Completion]:
        """Run one step, if not paused, or up to `most` decode steps where nothing needs the host in between, as calls
        that wait do; returns the new completions (aborted ones too) that no other call waits for."""
        self.driver.settle()
        return self.driver.run_step(self.mailboxes.take_unclaimed, most)

    def start(self) -> None:
        """Start a thread that runs the steps, so that callers only wait. Does nothing if it is started already. It
        sleeps while no request is live, while paused, and outside the rollout phase of a trainer's module."""
        self.driver.start()

    def stop(self) -> None:
        """End that thread after its current step. Live requests stay, and continue when steps run again."""
        self.driver.stop()

    def wake(self) -> None:
        """Wake the thread of a started engine after its module's rollout phase has begun."""
        self.driver.kick()

    def close(self) -> None:
        """Abort all requests; end the threads, free the KV and give the module back. Requests from its begin on raise
        EngineStopped. Does nothing in a forked child, or a second time; where it raises, it may be called again."""
        if self.driver.process.is_forked or self.driver.is_closed:
            return
        self.driver.inbox.close()  # first: a request that came in between would never be answered
        self.stop()
        if self.is_controller:
            self.abort_request(abort_all=True, message="the engine was closed")
        self._calls.close()
        self.weights.release_kv()
        self._owned_phase.close()
        self.driver.close()
        self.parts.close()

    def between_steps(self, name: str, run: Callable[[], T], timeout_s: float | None = None) -> T:
        """Call `run` in this thread between two steps, with no step in flight; returns its result."""
        return self.driver.command(name, run, None, timeout_s)

    # -- control ----------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self.gate.pause_mode is not None

    @property
    def pause_mode(self) -> PauseMode | None:
        """The mode of the current pause; None: not paused."""
        return self.gate.pause_mode

    def pause_generation(
        self, mode: PauseMode = "retract", *, op_id: str | None = None, timeout_s: float | None = None
    ) -> PauseReport:
        """Pause the steps until `continue_generation`. The pause holds when the call returns.

        in_place: sequences keep their KV; retract: they give it back, keep tokens and log-probabilities, and their KV
        is computed again later; abort: all end with their tokens so far. Requests added during a pause wait. Raises
        ValueError for another mode, DeadlineExceeded when `timeout_s` passed before it began.
        """
        check_pause(mode)
        pause = self._between_steps.pause
        return self.driver.control("pause_generation", lambda: pause(mode), op_id, timeout_s, mode=mode)

    def continue_generation(self, *, op_id: str | None = None, timeout_s: float | None = None) -> ContinueReport:
        """End a pause; the report says whether there was one."""
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
        """Abort a live request or all of them; they keep their tokens so far. `rid` is exact, or the base of n samples;
        an id that is not live is reported, not an error. Raises ValueError without `rid` and `abort_all`."""
        if rid is None and not abort_all:
            raise ValueError("abort_request needs a rid, or abort_all")
        reason = finished_reason or (FinishReason("abort", message=message) if message else None)
        return self.driver.control(
            "abort_request", lambda: self._between_steps.abort(None if abort_all else rid, reason), op_id, timeout_s,
            rid=rid, abort_all=abort_all, message=message, finished_reason=finished_reason,
        )  # fmt: skip

    # -- reports ----------------------------------------------------------------------------------------------------

    @property
    def weight_version(self) -> str:
        return self.parts.sequences.weight_version

    @property
    def weight_digest(self) -> str | None:
        return self.parts.sequences.weight_digest

    @property
    def epoch(self) -> int:
        """The number of weight commits. KV of an earlier epoch never matches a prefix again."""
        return self.parts.ledger.epoch

    @property
    def refusal(self) -> str | None:
        """The reason why steps are refused although generation is not paused; None: they are not."""
        return self.gate.refusal

    @property
    def is_started(self) -> bool:
        """Whether the engine's own thread runs the steps."""
        return self.driver.is_started

    @property
    def failure(self) -> Exception | None:
        """The error that ended the thread of `start`; None: no error."""
        return self.driver.failure

    @property
    def max_model_len(self) -> int:
        return self.parts.max_model_len

    @property
    def max_prompt_len(self) -> int:
        """The most tokens of a prompt: those of the context, or those for which the KV pool has room."""
        return min(self.max_model_len, self.parts.kv_plan.num_blocks * self.config.block_size)

    @property
    def kv_bytes(self) -> int:
        """The size of the KV pool; 0 while it is released."""
        return self.parts.kv_cache.num_bytes

    @property
    def metrics(self) -> Metrics:
        return self.parts.reports.metrics

    def state(self) -> dict[str, object]:
        """Return counts and modes of the engine's parts as plain values. Changes nothing."""
        return with_waiting(*self.driver.look(lambda: state_report(self.parts, self.gate, self.driver.inbox)))

    def live_sequences(self, num_newest: int = 16, limit: int | None = None) -> list[SequenceView]:
        """Return the running sequences, then the waiting ones, in order, at most `limit` of each. Changes nothing.
        num_newest: the number of last tokens in each view. Raises ValueError for a negative number."""
        parts, inbox = self.parts, self.driver.inbox
        return self.driver.look(lambda: views(parts.scheduler.running(), [*parts.scheduler.waiting(), *inbox.posted()],
                                              num_newest, limit, parts.why_no_draft))  # fmt: skip

    def check_integrity(self) -> None:
        """Check every block of the block ledger. Raises LedgerError naming each fault."""
        self.driver.look(self.parts.ledger.check)
