"""The engine: requests in, completions out, commands between the steps, from any thread."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from .completion import Completion, StreamChunk
from .config import EngineConfig
from .control.driver import Driver
from .control.intake import Intake, Params, Prompt, Settings, as_prompts, prompt_ids
from .control.mailboxes import Listener, Mailboxes
from .control.verbs import EngineVerbs
from .errors import EngineStopped, RankFailure
from .grammars.compiler import CompiledGrammar
from .loop.core import EngineCore
from .ranks.channel import RankChannel
from .ranks.mesh import Mesh
from .replica.calls import RankCalls
from .replica.follower import End, Follower
from .sampling_params import SamplingParams
from .sequences.request import Request, RequestOptions

logger = logging.getLogger(__name__)


class Engine(EngineVerbs):
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
        mesh: Mesh | None = None,
    ) -> None:
        """mesh: the ranks that share the model, this one's view; None: as `config.tp` and `config.pp` say, which is a
        collective of the whole torch.distributed job where they make more than one rank. Every rank of a replica makes
        its engine, with the same configuration; one engine at a time may use a mesh."""
        self.config = config = config or EngineConfig()
        self.ranks = RankChannel(_mesh(config, mesh), config.rank_timeout_s)
        self._mailboxes = Mailboxes()
        self._driver = Driver()
        self._core = EngineCore(
            model, config, tokenizer, self._mailboxes.on_token, self._mailboxes.on_answer,
            self._driver.is_interrupted, self.ranks,
        )  # fmt: skip
        self.ranks.on_loss.append(self._driver.on_loss)
        self._calls = RankCalls(self.ranks, None if self.is_controller else Follower(self.ranks, self._core.stage))
        self._driver.drive(self._core)
        self._driver.on_failure = self._mailboxes.on_failure
        self.model = self._core.model
        self.tokenizer = self._core.tokenizer
        self._intake = Intake(self.tokenizer, self.model.vocab_size, config.seed, self._core.grammars)
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
        [settings] = self._intake.settings([sampling_params])
        with self._driver.inbox_lock:
            requests = self._make_requests(prompt, settings, options, rid)
            self._driver.post(requests)
        self._driver.kick()
        return [request.id for request in requests]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        options: RequestOptions | None = None,
    ) -> list[Completion]:
        """Complete every prompt; answers in the order of the prompts, a prompt's n samples side by side.

        prompts: one text, one list of token ids, or a list of either; sampling_params: one for all, or one each.

        All ranks of a replica call this together, unless the others are in `follow`: the controller's prompts count,
        and everybody gets the same completions, or the controller's error. Raises RankFailure on every rank where one
        dies or hangs.
        """
        if not self.is_controller:
            with self.model.rollout_phase():
                return self._calls.join()
        with self._calls.call(self._quiet) as end_with:
            completions = self._generate(prompts, sampling_params, options)
            end_with(completions)
        return completions

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        sampling_params: Params | Sequence[Params],
        options: RequestOptions | None,
    ) -> list[Completion]:
        if prompts is None:
            raise ValueError("prompts may be None on ranks that follow, and this one is the controller")
        ids = self._add_all(prompts, sampling_params, options)
        try:
            with self.model.rollout_phase():
                self._driver.wait_until(lambda: self._mailboxes.all_done(ids))
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
                await self._driver.progress(lambda: self._mailboxes.all_done(ids))
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
                self._driver.wait_until(lambda: self._mailboxes.has_news(ids))
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
                    await self._driver.progress(lambda: self._mailboxes.has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            await asyncio.to_thread(self._let_go, ids)

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[Params],
        listener: Listener,
        *,
        rids: Sequence[str] | None = None,
        options: Sequence[RequestOptions] | None = None,
        streamed: bool = True,
    ) -> list[list[str]]:
        """Queue prompts, all or none, and return at once: the listener is told what comes of them by whoever runs the
        steps. Returns the ids of each prompt's n sequences. Without `streamed` it is told of answers only.

        Raises ValueError for a bad prompt or setting, or an id that a live request or another of the prompts has, and
        EngineStopped where the loop has ended; then nothing is queued.
        """
        count = len(prompts)
        options = options or [RequestOptions()] * count
        rids = rids or [uuid.uuid4().hex for _ in range(count)]
        if not len(sampling_params) == len(options) == len(rids) == count:
            raise ValueError(f"{count} prompts, but {len(sampling_params)} sampling_params, {len(options)} options and "
                             f"{len(rids)} rids")  # fmt: skip
        # Tokenising takes long for a long text, as grammars do: not under the lock that a step needs to begin.
        settings = self._intake.settings(sampling_params)
        token_ids = [prompt_ids(prompt, self.tokenizer, self.model.vocab_size) for prompt in prompts]
        with self._driver.inbox_lock:
            if self._driver.failure is not None:
                raise EngineStopped("the engine's loop has ended") from self._driver.failure
            asked = zip(token_ids, settings, options, rids, strict=True)
            groups = [self._make_requests(ids, setting, option, rid) for ids, setting, option, rid in asked]
            requests = [request for group in groups for request in group]
            ids = [request.id for request in requests]
            if twice := sorted({id for id in ids if ids.count(id) > 1}):
                raise ValueError(f"duplicate request ID detected: {', '.join(twice)}")
            self._mailboxes.connect(ids, listener, streamed=streamed)
            self._driver.post(requests)
        self._driver.kick()
        return [[request.id for request in group] for group in groups]

    def ask_grammars(self, params: Iterable[SamplingParams]) -> list[Future[CompiledGrammar]]:
        """Begin to compile the grammars that these ask for, and return at once: the promises of those that are not
        there yet. `submit` waits for them, so whoever must not wait there waits here. Raises ValueError."""
        return self._core.grammars.ask(params)

    def withdraw(self, listeners: Collection[Listener]) -> list[str]:
        """Abort whatever these listeners still wait for, and tell them nothing more; returns the ids."""
        with self._driver.lock:
            self._driver.take_inbox()
            ids = self._mailboxes.ids_of(listeners)
            if ids:
                self._let_go(ids)
        return ids

    # -- replicas of several ranks ----------------------------------------------------------------------------------

    @property
    def is_controller(self) -> bool:
        """Whether this rank takes requests and commands; the others of its replica follow it."""
        return self.ranks.mesh.is_controller

    def follow(self) -> End:
        """At a rank that is not the controller: do what the controller says, until it closes the engine ("closed") or
        calls `dismiss` ("call over"). Raises RankFailure where a rank dies or hangs; idle for hours is no failure."""
        if self.is_controller:
            raise ValueError(f"rank {self.ranks.mesh.rank} is the controller of its replica: it does not follow")
        with self.model.rollout_phase():
            return self._calls.follow()

    def dismiss(self) -> None:
        """At the controller: end `follow` on the ranks that are in it, after the step under way."""
        self.ranks.check_controller("dismiss")
        self._quiet()
        self._calls.dismiss()

    def _quiet(self) -> None:
        """Nothing is in the air afterwards."""
        self._driver.drain()

    # -- the loop ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is something to run."""
        return self._driver.has_work

    def step(self) -> list[Completion]:
        """Run one step; returns the sequences that ended since the last one, but for those that another call waits for.

        Runs nothing while paused, or when there is nothing to run; it still returns what an abort has ended.
        """
        self._driver.settle()
        with self._driver.lock:
            self._driver.run_step()
            return self._mailboxes.take_unclaimed()

    def start(self) -> None:
        """Let a thread of the engine's own drive the loop; callers then only wait. Does nothing when started.

        It sleeps while there is nothing to run, while paused, and outside the rollout phase of a trainer's module."""
        self._driver.start()

    def stop(self) -> None:
        """End that thread after the step it is in; live requests stay, and go on with the next who drives."""
        self._driver.stop()

    def wake(self) -> None:
        """Tell a started engine that its module's rollout phase has begun."""
        self._driver.kick()

    def close(self) -> None:
        """Abort what is live and give the KV, the threads and the module back."""
        self.stop()
        if self.is_controller:
            self.abort_request(abort_all=True, message="the engine was closed")
        try:
            self._calls.close()
        except RankFailure as failure:
            logger.warning("closing, though the replica is lost: %s", failure)
        self.release_kv()
        self._owned_phase.close()
        self._driver.close()
        self._core.loop.close()
        self._core.grammars.close()
        self._core.trace.close()

    # -- helpers ----------------------------------------------------------------------------------------------------

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
        settings = self._intake.settings(params_list)
        with self._driver.inbox_lock:
            requests: list[Request] = []  # one bad prompt, and none is queued
            for prompt, setting in zip(prompts, settings, strict=True):
                requests += self._make_requests(prompt, setting, options, None)
            ids = [request.id for request in requests]
            self._mailboxes.open(ids, streamed=streamed)
            self._driver.post(requests)
        self._driver.kick()
        return ids

    def _make_requests(
        self, prompt: Prompt, settings: Settings, options: RequestOptions | None, rid: str | None
    ) -> list[Request]:
        self.ranks.check_controller("requests")
        params = settings[0]
        rid = rid or uuid.uuid4().hex
        ids = [rid] if params.n == 1 else [f"{rid}-{index}" for index in range(params.n)]
        if taken := [id for id in ids if self._driver.is_live(id)]:
            raise ValueError(f"duplicate request ID detected: {', '.join(taken)}")
        requests = self._intake.requests(prompt, settings, options, ids)
        for request in requests:
            request.base_id = rid
        return requests

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
        with self._driver.lock:
            self._driver.take_inbox()
            for id in [id for id in ids if id in self._core.sequences]:
                self._mailboxes.close(id)
                self._mailboxes.open([id], streamed=False)  # its answer is nobody's
                self.abort_request(id, message="the caller went away")
            for id in ids:
                self._mailboxes.close(id)

    def _take_news(self, ids: list[str]) -> list[StreamChunk]:
        with self._driver.lock:
            return self._mailboxes.take(ids)


def _mesh(config: EngineConfig, mesh: Mesh | None) -> Mesh:
    """Raises ValueError where a mesh contradicts the configuration."""
    if mesh is None:
        if config.tp * config.pp == 1:
            return Mesh.single()
        return Mesh.build(config.tp, config.pp, timeout_s=config.rank_timeout_s)
    if (mesh.tp, mesh.pp) != (config.tp, config.pp):
        raise ValueError(f"the mesh has tp={mesh.tp} and pp={mesh.pp}, but the configuration tp={config.tp} and "
                         f"pp={config.pp}")  # fmt: skip
    return mesh
