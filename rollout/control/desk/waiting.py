"""Calls that wait for the answers to their prompts: at once, chunk by chunk, in a coroutine, or drawn again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import cast

from ...completion import Completion, StreamChunk
from ...loop.parts import Parts
from ...replica.calls import RankCalls
from ...request_options import Renewal, RequestOptions
from ...sampling_params import SamplingParams
from ..driver import Driver
from .intake import CheckedPrompt, Params, Prompt, as_prompts
from .mailboxes import Mailboxes
from .requests import RequestDesk
from .stream import Abandoned, Stream

Prompts = Prompt | Sequence[Prompt]
ManyParams = Params | Sequence[Params]
ManyOptions = RequestOptions | Sequence[RequestOptions] | None


class WaitingCalls:
    """Complete prompts for callers that wait, and abort the requests of those that wait no more."""

    def __init__(self, parts: Parts, driver: Driver, desk: RequestDesk, mailboxes: Mailboxes, calls: RankCalls) -> None:
        self._parts, self._driver, self._desk, self._mailboxes, self._calls = parts, driver, desk, mailboxes, calls
        self._abandoned = Abandoned(driver.lock, driver.inbox, desk.let_go)

    def generate(self, prompts: Prompts | None, params: ManyParams, options: ManyOptions) -> list[Completion]:
        """Complete every prompt, together with the other ranks of the replica."""
        return self.together(lambda: self._generate(prompts, params, options))

    def together(self, complete: Callable[[], list[Completion]]) -> list[Completion]:
        """Return what `complete` returns at the controller, on all ranks of the replica. Raises its errors."""
        self._driver.check_open()
        if not self._parts.ranks.mesh.is_controller:
            with self._parts.model.rollout_phase():
                return self._calls.join()
        with self._calls.call(self._driver.drain) as end_with:
            completions = complete()
            end_with(completions)
        return completions

    def _generate(self, prompts: Prompts | None, params: ManyParams, options: ManyOptions) -> list[Completion]:
        if prompts is None:
            raise ValueError("prompts may be None on ranks that follow, and this one is the controller")
        ids: list[str] = []
        try:
            self._add_all(ids, prompts, params, options)
            with self._parts.model.rollout_phase():
                self._driver.wait_until(self._mailboxes.when_done(ids))
            return self._mailboxes.completions(ids)
        finally:
            if ids:
                self._desk.let_go(ids)

    def renew(self, completions: Completion | Sequence[Completion]) -> list[Completion]:
        """Return the answers that the present weights give to the same requests, in the order of the given ones.

        They are those of `generate` with the same prompts, settings and seeds, bit for bit: tokens that come again cost
        a prefill, and only what follows the first other one is generated. An aborted answer goes on. All ranks of a
        replica call this together, as `generate`. Raises ValueError naming each answer that does not say what it was
        drawn with, or has tokens outside the vocabulary or more than its max_new_tokens.
        """
        if isinstance(completions, Completion):
            completions = [completions]
        if wrong := [one for one in completions if not isinstance(one, Completion)]:
            raise ValueError(f"cannot renew {wrong[0]!r:.100}, which is no Completion")
        faults = [f"{one.id}: it does not say what it was drawn with" for one in completions if one.drawn_with is None]
        prompts, params, options = [], [], []
        for one in completions:
            if one.drawn_with is None:
                continue
            prompt, its_params, its_options = renewal_of(one)
            try:
                self._desk.intake.checked(prompt, its_params, its_options)
            except ValueError as error:
                faults.append(f"{one.id}: {error}")
            prompts.append(prompt)
            params.append(its_params)
            options.append(its_options)
        if faults:
            raise ValueError("cannot renew " + "; ".join(faults))
        return self.generate(prompts, params, options) if completions else []

    async def agenerate(self, prompts: Prompts, params: ManyParams, options: ManyOptions) -> list[Completion]:
        """Complete every prompt as `generate` does, in a coroutine."""
        ids = await self._add_all_async(prompts, params, options)
        end = self._driver.kept_phase.until(partial(self._desk.let_go, ids))
        try:
            are_done = self._mailboxes.when_done(ids)
            while not are_done():
                await self._driver.progress(are_done)
            return self._mailboxes.completions(ids)
        finally:
            await _to_its_end(end)

    def stream(self, prompt: Prompt, params: Params, options: RequestOptions | None) -> Iterator[StreamChunk]:
        """Complete one prompt, chunk by chunk."""
        ids: list[str] = []
        return Stream(self._chunks(ids, prompt, params, options), ids, self._abandoned)

    def _chunks(
        self, ids: list[str], prompt: Prompt, params: Params, options: RequestOptions | None
    ) -> Generator[StreamChunk]:
        self._add_all(ids, [prompt], params, options, streamed=True)
        num_open = len(ids)
        while num_open:
            self._driver.wait_until(lambda: self._mailboxes.has_news(ids))
            for chunk in self._take_news(ids):
                num_open -= chunk.completion is not None
                yield chunk

    async def astream(
        self, prompt: Prompt, params: Params, options: RequestOptions | None
    ) -> AsyncIterator[StreamChunk]:
        """Complete one prompt as `stream` does, for `async for`."""
        ids = await self._add_all_async([prompt], params, options, streamed=True)
        try:
            num_open = len(ids)
            while num_open:
                if not self._mailboxes.has_news(ids):
                    await self._driver.progress(lambda: self._mailboxes.has_news(ids))
                for chunk in self._take_news(ids):
                    num_open -= chunk.completion is not None
                    yield chunk
        finally:
            await _to_its_end(partial(self._desk.let_go, ids))

    def _add_all(
        self,
        added: list[str],
        prompts: Prompts,
        params: ManyParams,
        options: ManyOptions,
        *,
        streamed: bool = False,
    ) -> None:
        """Queue prompts. added: takes their ids as they are queued, so that an interrupt behind that leaves none
        unknown."""
        self._driver.check_open()
        prompts = as_prompts(prompts)
        many = isinstance(params, Sequence) and not isinstance(params, str)
        params_list = list(cast(Sequence[Params], params)) if many else [cast(Params, params)] * len(prompts)
        if len(params_list) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params_list)} sampling_params")
        count = len(prompts)
        options_list = list(options) if isinstance(options, Sequence) else [options or RequestOptions()] * count
        if len(options_list) != count:
            raise ValueError(f"{count} prompts, but {len(options_list)} options")
        settings = self._desk.intake.settings(params_list)

        def connect(ids: list[str]) -> None:
            self._mailboxes.open(ids, streamed=streamed)
            added.extend(ids)

        self._desk.post(prompts, settings, options_list, [None] * count, connect)

    async def _add_all_async(
        self, prompts: Prompts, params: ManyParams, options: ManyOptions, *, streamed: bool = False
    ) -> list[str]:
        added: list[str] = []
        done = threading.Event()

        def add() -> None:
            try:
                self._add_all(added, prompts, params, options, streamed=streamed)
            finally:
                done.set()

        def take_back() -> None:
            done.wait()  # a thread cannot be stopped: its requests are aborted
            if added:
                self._desk.let_go(added)

        try:
            await _to_its_end(add)
        except asyncio.CancelledError:
            await _to_its_end(take_back)
            raise
        return added

    def _take_news(self, ids: Sequence[str]) -> list[StreamChunk]:
        with self._driver.lock:
            return self._mailboxes.take(ids)


async def _to_its_end(function: Callable[[], None]) -> None:
    """Run a function in a thread, and wait for it. It runs to its end however often the wait is cancelled."""
    # No task: the end of `asyncio.run` would cancel it as well, and what was queued would stay.
    run = partial(copy_context().run, function)
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, run))


def renewal_of(completion: Completion) -> tuple[CheckedPrompt, SamplingParams, RequestOptions]:
    """Return the request that draws an answer again: prompt, parameters, options. It must say what it was drawn
    with."""
    drawn = completion.drawn_with
    assert drawn is not None
    options = replace(drawn.options, renewal=Renewal.of(completion), begun=None)
    return CheckedPrompt(list(completion.prompt_ids), drawn.images), replace(drawn.params, n=1), options
