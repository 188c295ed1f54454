"""Requests and their output between the server's event loop and the engine's thread.

No thread waits for a request, so any number of requests can be open while the engine is paused. A step wakes the event
loop once, for all of its sequences.

    event loop      | subscribe ----> intake thread, or one for images: tokenise, decode, engine.requests.submit
                    | take <--------- one call_soon_threadsafe a step <---- engine's thread: on_chunk
                    | leave --------> leaving thread: engine.requests.withdraw, one call for all clients that have left
                    | _withdrawn <--- one call_soon_threadsafe: only now their requests count no longer

A request counts in the limits of the queue as long as the engine may have a sequence of it: clients that leave and come
again faster than their requests are withdrawn are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ....rollout.completion import Completion, StreamChunk
from ....rollout.control.desk.intake import Prompt
from ....rollout.engine import Engine
from ....rollout.errors import EngineStopped, GrammarError
from ....rollout.grammars.cache import Promise
from ..edge.bodies import start_parsers
from ..edge.config import HttpConfig
from ..edge.disconnect import unless_gone
from ..edge.errors import Draining, HttpError
from ..edge.threads import run_giving_way, start_pool
from ..images.kept import OpenImages
from ..images.reading import read_images, unread
from .admission import Admission, Size
from .answers import Answer, Reply
from .asked import Asked
from .early_aborts import EarlyAborts, Preparing, are_compiled, without_grammars
from .encoding import Encoder, encode
from .grammar_limits import check_grammars
from .limits import OpenEntries, RequestLimits
from .loss_watch import LossWatch
from .naming import WeightNaming
from .sse import EventStream

logger = logging.getLogger(__name__)

_INTAKE_THREADS = 4
_IMAGE_THREADS = 2  # that decode images, and as many in which these wait for the model
CLIENT_GONE = Response(status_code=499)  # returned to the framework; the client has disconnected
T = TypeVar("T")


class Subscription:
    """The sequences of one HTTP request and their output. Used by the event loop only, except for the `on_` methods,
    which the engine calls."""

    def __init__(self, hub: Hub, *, has_images: bool = False) -> None:
        self._hub, self.has_images = hub, has_images
        self._chunks: list[StreamChunk] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: EngineStopped | HttpError | None = None
        self.asked: Asked
        self.index_of: dict[str, int] = {}  # by sequence id, in the order of prompts and of their samples
        self.num_open = 0
        self.has_left = False  # the client has left while a thread may queue sequences, or before theirs have ended

    def check_here(self) -> None:
        """Raise ClientDisconnect if the client has left: nothing is queued for it then. Any thread may call."""
        if self.has_left:
            raise ClientDisconnect

    def on_chunk(self, chunk: StreamChunk) -> None:
        self._hub.post(self, chunk)

    def on_failure(self, error: EngineStopped) -> None:
        self._hub.post(self, error)

    def deliver(self, news: StreamChunk | EngineStopped | HttpError) -> None:
        if isinstance(news, StreamChunk):
            self._chunks.append(news)
        else:
            self._failure = news
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[StreamChunk]:
        """Wait for at least one chunk and return all since the last call. Raises EngineStopped or HttpError when none
        will come."""
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunks, self._chunks = self._chunks, []
        num_ended = sum(chunk.completion is not None for chunk in chunks)
        self.num_open -= num_ended
        self._hub.admission.ended(self, num_ended)
        return chunks

    async def encode(self, make: Callable[[], bytes], cost: int) -> bytes:
        """Return `make()`, see `Encoder.run`."""
        return await self._hub.encoder.run(make, cost)

    async def completions(self) -> list[Completion]:
        """Wait for all answers and return them in the order of `index_of`. Raises EngineStopped."""
        answers: dict[str, Completion] = {}
        while self.num_open:
            answers.update((c.id, c.completion) for c in await self.take() if c.completion is not None)
        return [answers[id] for id in self.index_of]


class Hub:
    """The open requests of one event loop."""

    def __init__(
        self, engine: Engine, config: HttpConfig | None = None, loss: Callable[[], str | None] = lambda: None,
        name_weights: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Start the threads. loss: the reason why no request runs until the weights are updated; None: they run.
        name_weights: gives the weights a digest, which receipts need."""
        self.engine = engine
        self.config = config or HttpConfig()
        self.limits = RequestLimits(engine, self.config)
        self.admission = Admission(engine, self.config)
        self.entries = OpenEntries(self.config.max_open_logprob_entries)
        self.image_bytes = OpenImages(self.config.max_open_image_bytes)
        self.loop = asyncio.get_running_loop()
        self.encoder = Encoder()
        self.is_draining = False  # new requests are refused: the server will end
        self.open: set[Subscription] = set()  # admitted, and neither answered nor left
        self.early_aborts = EarlyAborts()
        self._losses = LossWatch(loss, self.config.refusal_timeout_s, self.open)
        start_parsers()
        self._intake = start_pool(_INTAKE_THREADS, "lockstep-intake")
        self._naming = WeightNaming(engine, name_weights, self._intake)
        self.image_threads = (
            self._intake if self.limits.images.no_images else start_pool(_IMAGE_THREADS, "lockstep-images")
        )
        self._reading = self._intake if self.limits.images.no_images else start_pool(_IMAGE_THREADS, "lockstep-reading")
        self._leaving_thread = start_pool(1, "lockstep-leaving")
        self._leaving: deque[Subscription] = deque()
        self._news: deque[tuple[Subscription, StreamChunk | EngineStopped]] = deque()
        self._is_waking = False

    def refuse_if_draining(self) -> None:
        """Raise Draining if the server takes no new requests."""
        if self.is_draining:
            raise Draining

    async def answer(self, request: Request, reply: Reply) -> Response:
        """Run the request and answer the client; abort its sequences if the client disconnects. Raises Draining,
        Overloaded, and the errors of `reply.asked`, `reply.whole` and `Engine.submit`."""
        self.refuse_if_draining()
        if reply.is_streamed:
            subscription = await self.subscribe(reply.asked, streamed=True, size=reply.size)
            return EventStream(reply.events(subscription), on_end=partial(self._end, subscription))
        subscription = self._admit(reply.size)
        try:
            content = await unless_gone(request, self._whole(subscription, reply))
        except ClientDisconnect:
            self._release_entries(subscription)
            return CLIENT_GONE
        except BaseException:
            self._release_entries(subscription)
            raise
        return Answer(content, on_end=partial(self._release, subscription))

    async def _whole(self, subscription: Subscription, reply: Reply) -> bytes:
        """Wait for the answers and return their JSON."""
        await self._subscribe(subscription, reply.asked, streamed=False)
        try:
            completions = await subscription.completions()
            cost = reply.cost(completions)

            def make() -> bytes:
                answer = reply.whole(completions)
                while completions:  # each is let go here and by itself, not with all others on the event loop
                    completions.pop()
                return encode(answer)

            return await self.encoder.run(make, cost)
        finally:
            self.leave(subscription)

    def _admit(self, size: Size) -> Subscription:
        """Open a request, until `leave`. Raises the errors of `Admission.take`."""
        subscription = Subscription(self, has_images=size.has_images)
        self.image_bytes.take(subscription, size.num_image_bytes)
        try:
            self.admission.take(subscription, size)
        except BaseException:
            self.image_bytes.release(subscription)
            raise
        self.open.add(subscription)
        self._losses.start()
        return subscription

    def _close(self, subscription: Subscription) -> None:
        """Count a request no longer, unless sequences of it are still to be withdrawn."""
        self.open.discard(subscription)
        if not subscription.has_left:
            self.admission.release(subscription)

    def _release_entries(self, subscription: Subscription) -> None:
        if not subscription.has_left:
            self._release(subscription)

    def _release(self, subscription: Subscription) -> None:
        self.entries.release(subscription)
        self.image_bytes.release(subscription)

    async def subscribe(self, prepare: Callable[[], Asked], *, streamed: bool, size: Size) -> Subscription:
        """Run `prepare` in a thread and queue its requests. Call `leave` at the end. Raises the errors of `prepare`,
        `Admission.take` and `Engine.submit`."""
        subscription = self._admit(size)
        await self._subscribe(subscription, prepare, streamed=streamed)
        return subscription

    async def _subscribe(self, subscription: Subscription, prepare: Callable[[], Asked], *, streamed: bool) -> None:
        try:
            await self._queue(subscription, prepare, streamed=streamed)
        except BaseException:
            self.leave(subscription)  # they may be queued already
            self._release_entries(subscription)
            raise

    async def _queue(self, subscription: Subscription, prepare: Callable[[], Asked], *, streamed: bool) -> None:
        """Run `prepare` in a thread and queue its requests."""
        prompts: Sequence[Prompt] = ()  # those with images as the engine has read them

        def submit() -> list[list[str]]:
            subscription.check_here()
            asked = subscription.asked
            return self.engine.requests.submit(
                prompts or asked.prompts, asked.params, subscription, rids=asked.rids, options=asked.options,
                streamed=streamed, aborted=preparing.aborted,  # it may be without its grammar or its images
            )  # fmt: skip

        missing: list[Promise] = []
        preparing = self.early_aborts.begin()

        def make() -> None:
            subscription.check_here()
            subscription.asked = preparing.asked = prepare()

        def begin() -> list[list[str]] | None:
            if not subscription.has_images:
                make()
            asked = subscription.asked
            check_grammars(asked.params, self.config, asked.grammar_field)
            self.entries.take(subscription, self.limits.num_open_entries(asked.prompts, asked.params, asked.options))
            return None if self._naming.is_due(asked) else go_on()

        def go_on() -> list[list[str]]:
            missing.extend(self.engine.requests.ask_grammars(subscription.asked.params))
            return [] if missing else submit()

        try:
            if subscription.has_images:
                await self._in_thread(make, subscription, self.image_threads)
                prompts = await self._read(subscription, preparing)
            groups = await self._in_thread(begin, subscription, self._intake, missing)
            if groups is None:
                await self._naming.run()
                groups = await self._in_thread(go_on, subscription, self._intake, missing)
            if missing:  # a grammar may take long, and there are few intake threads: wait in the event loop
                try:
                    if not await are_compiled(missing, preparing):
                        subscription.asked = without_grammars(subscription.asked)
                finally:
                    self.engine.requests.leave_grammars(missing)
                groups = await self._in_thread(submit, subscription, self._intake)
        except GrammarError as error:
            raise HttpError(400, str(error), param=subscription.asked.grammar_field) from error
        finally:
            self.early_aborts.end(preparing)
        ids = [id for group in groups for id in group]
        subscription.index_of = {id: index for index, id in enumerate(ids)}
        subscription.num_open += len(ids)

    async def _read(self, subscription: Subscription, preparing: Preparing) -> list[Prompt]:
        """Return the prompts of a request as the engine reads them, which may wait for the model."""
        given = subscription.asked.prompts

        def read() -> list[Prompt]:
            share = partial(self.image_bytes.share, subscription)
            return read_images(self.engine, given, share, subscription.check_here, lambda: preparing.is_aborted)

        return await self._in_thread(read, subscription, self._reading, aborted=(preparing, partial(unread, given)))

    async def _in_thread(
        self, run: Callable[[], T], subscription: Subscription, threads: Executor, missing: Sequence[Promise] = (),
        aborted: tuple[Preparing, Callable[[], T]] | None = None,
    ) -> T:  # fmt: skip
        """Return `run()` from a thread. aborted: what to return where the request is aborted before that begins."""
        job = threads.submit(run_giving_way, self.loop, run)
        running = asyncio.wrap_future(job)
        try:
            if aborted and not await aborted[0].unless_aborted(running) and job.cancel():
                return aborted[1]()
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # a thread cannot be stopped: withdraw the requests that it queues
            subscription.has_left = True

            def withdraw(done: asyncio.Future[T]) -> None:
                self.engine.requests.leave_grammars(missing)
                if done.exception() is None:
                    self._withdraw_soon(subscription)
                else:
                    self._withdrawn([subscription])

            running.add_done_callback(withdraw)
            raise

    def _end(self, subscription: Subscription) -> None:
        """Leave a stream that has ended."""
        self.leave(subscription)
        self._release_entries(subscription)

    def leave(self, subscription: Subscription) -> None:
        """Abort the subscription's open sequences, after the current step."""
        if subscription.num_open:
            subscription.num_open = 0
            subscription.has_left = True
            self._withdraw_soon(subscription)
        self._close(subscription)

    def post(self, subscription: Subscription, news: StreamChunk | EngineStopped) -> None:
        """Pass a chunk or an error to the event loop. Called by the engine's thread."""
        self._news.append((subscription, news))
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the event loop is closed, and its subscriptions with it
                self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_waking = False  # before the queue is read: news after that wake the loop again
        while self._news:
            subscription, news = self._news.popleft()
            subscription.deliver(news)

    def _withdraw_soon(self, subscription: Subscription) -> None:
        self._leaving.append(subscription)
        self._leaving_thread.submit(self._withdraw)

    def _withdraw(self) -> None:
        leaving = set()
        while self._leaving:
            leaving.add(self._leaving.popleft())
        if leaving:
            try:
                self.engine.requests.withdraw(leaving)
            except Exception:  # the last frame of this thread's task: its result is not read
                logger.exception("requests of %d clients that have left could not be aborted", len(leaving))
            with suppress(RuntimeError):  # the event loop is closed
                self.loop.call_soon_threadsafe(self._withdrawn, leaving)

    def _withdrawn(self, subscriptions: Iterable[Subscription]) -> None:
        """Count requests no longer whose clients have left: the engine has no sequence of theirs."""
        for subscription in subscriptions:
            self.admission.release(subscription)
            self._release(subscription)


def stop_taking(app: Starlette) -> None:
    """Refuse new generation requests from now on."""
    app.state.is_draining = app.state.conversations.is_draining = True
    if (hub := getattr(app.state, "hub", None)) is not None:
        hub.is_draining = True


def hub_of(app: Starlette) -> Hub:
    """Return the hub of the running event loop; make it, with its threads, at the first call."""
    hub = getattr(app.state, "hub", None)
    if hub is None or hub.loop is not asyncio.get_running_loop():
        service = app.state.service
        hub = app.state.hub = Hub(
            service.engine, app.state.config, lambda: service.sessions.loss, service.name_weights
        )  # fmt: skip
        hub.is_draining = app.state.is_draining
    return hub
