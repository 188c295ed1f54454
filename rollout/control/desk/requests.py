"""The way of callers' requests to the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from ...check.image_check import checking_reader
from ...completion import FinishReason
from ...errors import EngineStopped
from ...grammars.cache import Promise
from ...held_signals import Uninterrupted
from ...loop.between_steps import ABORTED_IN_QUEUE, BetweenSteps
from ...loop.parts import Parts
from ...model.loading import media_tokens
from ...request_options import RequestOptions
from ...sampling_params import SamplingParams
from ...sequences.request import Request, fresh_ids
from ..driver import SLICE, Driver
from .inbox import Inbox
from .intake import CheckedPrompt, Intake, Params, Prompt, Settings
from .mailboxes import Listener, Mailbox, Mailboxes

Aborted = Mapping[str, FinishReason | None]  # rids, with the reasons; None: SGLang's


def none_aborted() -> Aborted:
    """Return that no requests are aborted."""
    return {}


T = TypeVar("T")
_AS_A_WHOLE = Uninterrupted()


class RequestDesk:
    """Queue requests, and abort those that no caller waits for any more."""

    def __init__(
        self,
        parts: Parts,
        driver: Driver,
        inbox: Inbox,
        mailboxes: Mailboxes,
        between_steps: BetweenSteps,
    ) -> None:
        self._parts, self._driver, self._between_steps = parts, driver, between_steps
        self._inbox, self._mailboxes = inbox, mailboxes
        self.intake = Intake(
            parts.tokenizer, parts.model.vocab_size, parts.config.seed, parts.grammars,
            media_tokens(parts.model.module.config), max_model_len=parts.max_model_len,
            eos_token_ids=parts.eos_token_ids,
            image_reader=checking_reader(
                parts.model, parts.ranks, self._with_weights, parts.limits.most_prompt_rows
            ),
        )  # fmt: skip

    def _with_weights(self, name: str, run: Callable[[], T]) -> T:
        """Run the model between two steps. Raises what a step raises while the weights hold nothing."""

        def checked() -> T:
            self._between_steps.check_weights()
            return run()

        return self._driver.command(name, checked)

    def read_images(
        self, prompt: Mapping[str, object], computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> list[int]:
        """Return what a processor makes of a text and its images as a prompt for `submit`. computing: makes the context
        in which the model runs, as it does for sizes of images that are new to it. Raises ValueError, and what a step
        raises while the weights hold nothing."""
        self._driver.check_open()
        return self.intake.read(prompt, computing)

    def tokens_of(self, prompt: Prompt) -> CheckedPrompt:
        """Return the token ids and images of a prompt that is looked for in the cache. Raises ValueError."""
        return self.intake.tokens_of(prompt)

    def add(self, prompt: Prompt, params: Params, options: RequestOptions | None, rid: str | None) -> list[str]:
        """Queue one prompt without waiting for its answers; returns the ids of its n sequences."""
        self._driver.check_open()
        [settings] = self.intake.settings([params])
        [ids] = self.post([prompt], [settings], [options or RequestOptions()], [rid], lambda ids: None)
        return ids

    def submit(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Sequence[Params | Settings],
        listener: Listener,
        *,
        rids: Sequence[str] | None = None,
        options: Sequence[RequestOptions] | None = None,
        streamed: bool = True,
        aborted: Callable[[], Aborted] = none_aborted,
    ) -> list[list[str]]:
        """Queue prompts, all or none, and return the ids of each prompt's n sequences at once. aborted: asked when they
        are queued for the rids of those that are answered as aborted before they run; later ones the engine has.

        The thread that runs the steps calls the listener with the chunks, or without `streamed` with the answers only.
        Raises ValueError for a bad prompt or setting, or an id that a live request or another of the prompts has, and
        EngineStopped if the loop has ended or the engine is closed; then nothing is queued.
        """
        self._driver.check_open()
        count = len(prompts)
        options = options or [RequestOptions()] * count
        rids = rids or fresh_ids(count)
        if not len(sampling_params) == len(options) == len(rids) == count:
            raise ValueError(f"{count} prompts, but {len(sampling_params)} sampling_params, {len(options)} options and "
                             f"{len(rids)} rids")  # fmt: skip
        # Long texts and grammars take long: they are not prepared under the lock that a step needs to begin.
        settings = self.intake.settings(sampling_params)

        def connect(ids: list[str]) -> None:
            if self._driver.failure is not None:
                raise EngineStopped("the engine's loop has ended") from self._driver.failure
            self._mailboxes.connect(ids, listener, streamed=streamed)

        return self.post(prompts, settings, options, rids, connect, aborted)

    def check(self, prompt: Prompt, params: Params, options: RequestOptions) -> tuple[CheckedPrompt, Settings]:
        """Return a prompt and settings as `submit` reads them, which may be submitted in their place: a later `submit`
        of them waits for no grammar. Raises the ValueError that `submit` would raise."""
        [settings] = self.intake.settings([params])
        checked = self.intake.checked(prompt, settings[0], options)
        self.intake.requests(checked, settings, options, ["checked"], 0)  # a grammar, or begun tokens, may not fit
        return checked, settings

    def ask_grammars(self, params: Iterable[SamplingParams]) -> list[Promise]:
        """Start to compile the grammars of these parameters; returns the unfinished ones at once.

        `submit` waits for them: a caller that must not block there awaits these futures first, and calls
        `leave_grammars` at the end. Raises ValueError and Overloaded.
        """
        self._driver.process.check()
        return self._parts.grammars.ask(params)

    def leave_grammars(self, promises: Iterable[Promise]) -> None:
        """Wait no more for these grammars: one that no call waits for is not compiled."""
        self._parts.grammars.leave(promises)

    def withdraw(self, listeners: Collection[Listener]) -> list[str]:
        """Abort the requests that these listeners wait for, and call them no more; returns the ids."""
        self._driver.process.check()
        with self._driver.lock:
            boxes = self._mailboxes.of(listeners)
            ids = list(boxes)
            self._driver.take_back(ids)  # all at once, before a command below queues them
        for at in range(0, len(ids), SLICE):  # steps run in between
            self.let_go(ids[at : at + SLICE], boxes)
        return ids

    def post(
        self,
        prompts: Sequence[Prompt],
        settings: Sequence[Settings],
        options: Sequence[RequestOptions],
        rids: Sequence[str | None],
        connect: Callable[[list[str]], object],
        aborted: Callable[[], Aborted] = none_aborted,
    ) -> list[list[str]]:
        """Make the requests of some prompts and post them, all or none; return the ids of each prompt's sequences.

        Thousands take long to make: the inbox's lock, which a step needs to begin, is held only before, to claim their
        ids and numbers, and after. connect: called with all ids under the lock, before they are posted. aborted: as of
        `submit`. Where an interrupt ends this, nothing is queued.
        """
        self._parts.ranks.check_controller("requests")
        asked = list(zip(prompts, settings, options, rids, strict=True))
        if bad := [rid for rid in rids if not isinstance(rid, str | None)]:
            raise ValueError(f"a rid must be a text, not {bad[0]!r:.100}")
        if wrong := [one for one in options if not isinstance(one, RequestOptions)]:
            raise ValueError(f"options are RequestOptions, not {wrong[0]!r:.100}")
        checked = [self.intake.checked(prompt, setting[0], option) for prompt, setting, option, _ in asked]
        names = [rid or fresh for rid, fresh in zip(rids, fresh_ids(len(rids)), strict=True)]
        groups = [
            [name] if setting[0].n == 1 else [f"{name}-{index}" for index in range(setting[0].n)]
            for name, setting in zip(names, settings, strict=True)
        ]
        ids = [id for group in groups for id in group]
        claimed: list[str] = []
        is_posted = False
        try:
            with _AS_A_WHOLE, self._inbox.lock:
                self._check_free(ids)
                self._inbox.claim(ids)
                claimed = ids
                number = self.intake.numbers(len(ids))
            requests: list[Request] = []
            for prompt, (_, setting, option, _), name, group in zip(checked, asked, names, groups, strict=True):
                made = self.intake.requests(prompt, setting, option, group, number + len(requests))
                for request in made:
                    request.base_id, request.prompt_id = option.base_id or name, name
                requests += made
            with _AS_A_WHOLE, self._inbox.lock:
                self._driver.check_open()  # again: the engine may have been closed while the requests were made
                connect(ids)
                _mark(requests, aborted())
                self._inbox.post(requests)
                self._inbox.disclaim(claimed)
                is_posted = True
            self._driver.kick()
        except BaseException:
            if is_posted:  # an interrupt: the caller will not know of them
                self.let_go(ids)
            with _AS_A_WHOLE, self._inbox.lock:
                self._inbox.disclaim(claimed)
            raise
        return groups

    def _check_free(self, ids: Sequence[str]) -> None:
        """Raise ValueError for ids that others have, or that come twice. The caller holds the inbox's lock."""
        is_kept = self._mailboxes.keeps_id  # a request that ends is kept before it is no sequence any more
        taken = {id for id in ids if id in self._inbox or id in self._parts.sequences or is_kept(id)}
        taken |= {id for id, num in Counter(ids).items() if num > 1}
        if taken:
            raise ValueError(f"duplicate request ID detected: {', '.join(sorted(taken))}")

    def let_go(self, ids: Sequence[str], boxes: Mapping[str, Mailbox] | None = None) -> None:
        """Abort the requests that still run, and remove all mailboxes: no call waits for them any more.

        boxes: their mailboxes. A request that has ended by itself may have a successor of the same id, which stays.
        """
        if self._driver.process.is_forked:  # of a stream that the parent goes on with
            return
        reason = FinishReason("abort", message="the caller went away")
        with self._driver.lock:
            if boxes is not None:
                with self._inbox.lock:
                    ids = [id for id in ids if self._mailboxes.is_open(id, boxes[id])]
            self._driver.take_back(ids)  # to queue them only to abort them would keep the lock for long
            live = {id: self._parts.sequences.request(id) for id in ids if id in self._parts.sequences}
            for id in ids:
                self._mailboxes.close(id)
            unread = self._mailboxes.open(live, streamed=False)  # their answers are dropped with the boxes
        try:
            if live:
                abort = partial(self._between_steps.abort_listed, live.values(), reason)
                self._driver.command("abort_request", abort)
        finally:
            with self._driver.lock, self._inbox.lock:
                for id, box in unread.items():
                    self._mailboxes.close(id, box)


def _mark(requests: Iterable[Request], aborted: Aborted) -> None:
    """Mark those requests whose prompts are aborted."""
    for request in requests if aborted else ():
        if request.prompt_id in aborted:
            request.aborted = aborted[request.prompt_id] or ABORTED_IN_QUEUE
