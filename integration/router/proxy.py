"""The forwarding of a request to one worker, or to another one if the first fails before it has produced output.

An answer that is no event stream is forwarded when it is complete, so until then the request can begin again elsewhere;
the part of it that the router has no memory for is passed on as it comes. A stream is forwarded event by event. After
its first event it goes on where it was, at a worker with the same weights and numerics; where there is none, it ends
with an error event, and without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Coroutine
from dataclasses import replace
from typing import Any

from starlette.types import Send

from ..http.edge.bodies import off_loop
from ..http.edge.disconnect import first_of
from ..http.edge.errors import HttpError
from .choosing import Chooser
from .config import RouterConfig
from .counters import Moved, Outcome, RouterCounters
from .course import Course, Generation
from .fleet.aborted import Aborted
from .fleet.held import HeldRequests
from .fleet.worker import Worker
from .fleet.workers import WorkerRegistry, why_none
from .moving.ending import last_events
from .moving.fields import with_fields
from .moving.hedging import Race
from .moving.progress import Progress
from .passing import Passing
from .relay import Drains, Full, Relay, Unavailable, is_stream, refusal
from .sessions import home_of
from .wire import NoDescriptors, Wire, WorkerFailed, beginning

logger = logging.getLogger(__name__)

_MAX_REFUSAL_BYTES = 1 << 16  # of a 503 that are read, before the request moves or the answer is passed on

_TOO_LONG = 413  # says nothing of the worker's weights
_MANY_TOKENS = 1 << 10  # of a stream; to write so many takes a millisecond


class _WorkerDied(Exception):
    """The health checks found the worker dead."""


class _Begun(Exception):
    """The attempt failed after the client had received a part of the answer."""


class Proxy:
    """The part of a router that chooses workers and forwards requests."""

    def __init__(self, registry: WorkerRegistry, wire: Wire, config: RouterConfig, counters: RouterCounters) -> None:
        self._registry = registry
        self._counters = counters
        self._wire = wire
        self._config = config
        self._choosing = Chooser(registry, config, counters)
        self._passing = Passing(config.max_kept_answer_bytes)
        self._limits: set[asyncio.Timeout] = set()  # of the open attempts
        self._is_ending = False
        self.held = HeldRequests(registry, config.max_held_requests)

    def forget(self, worker: Worker) -> None:
        """Forget the prompts of a worker whose cache is lost."""
        self._choosing.forget(worker)

    def end(self) -> None:
        """End all open requests with an error, because the router ends."""
        self._is_ending = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    async def run(self, generation: Generation, send: Send) -> None:
        """Answer the request. Raises HttpError, before anything was sent, if no worker could answer."""
        with self.held.aborts.since_now() as aborts:
            await self._run_to_end(generation, send, Course(time.monotonic() + self._config.request_timeout_s, aborts))

    async def _run_to_end(self, generation: Generation, send: Send, course: Course) -> None:
        try:
            await self._run(generation, send, course)
        except Aborted as aborted:
            if course.relay is None or not course.has_begun:
                raise
            await self._end_aborted(aborted, generation, course.relay)
        except HttpError as error:
            if course.relay is not None and course.has_begun:
                self._counters.moves[Moved.REFUSED] += 1
                url, why = course.failures[-1]
                ended = f"worker {url} ended in the middle of this answer to {generation.call.path}: {why}"
                await course.relay.fail(f"{ended}; it cannot go on elsewhere: {error.message}", Outcome.BROKEN)
                return
            self._counters.unanswered[error.code or str(error.status)] += 1
            raise

    async def _end_aborted(self, aborted: Aborted, generation: Generation, relay: Relay) -> None:
        """End a stream that was aborted between two workers."""
        self._counters.moves[Moved.ABORTED] += 1
        assert generation.progress is not None  # else it would not have left its worker
        try:
            events = await last_events(aborted, generation.progress, self._config.http.max_body_lists)
        except HttpError as error:
            await relay.fail(f"{generation.call.path} was aborted: {error.message}", Outcome.BROKEN, retryable=False)
        else:
            await relay.finish(events)

    async def _run(self, generation: Generation, send: Send, course: Course) -> None:
        while len(course.failures) < self._config.max_attempts:
            worker = await self._pick(generation, course)
            self._counters.num_retries += course.num_sent > 0
            course.num_sent += 1
            if course.relay is not None and course.has_begun:
                relay = course.relay.at(worker)
                self._counters.moves[Moved.MOVED] += 1
            else:
                is_last = len(course.failures) + 1 == self._config.max_attempts
                relay = Relay(send, worker, generation.call.path, is_last)
            course.relay, why = relay, ""
            try:
                relay, why = await self._hedged(worker, generation, relay, course)
            finally:
                course.relay = relay
            worker = relay.worker
            if relay.outcome is Outcome.TIMED_OUT and not relay.has_begun:
                raise HttpError(504, why, code="timeout") if not self._is_ending else _ending(why)
            if relay.outcome is Outcome.MOVED:
                course.failed(worker, why, generation.progress)
            elif relay.outcome not in (Outcome.DRAINING, Outcome.FULL):  # no attempts: the worker has begun nothing
                return
            rids, max_lists = _open_rids(generation), self._config.http.max_body_lists
            await self.held.end_if_aborted(generation.call, rids, course.aborts, max_lists)
        listed = "; ".join(f"{url}: {why}" for url, why in course.failures)
        what = "one after the other" if course.has_begun else "before they produced anything"
        raise HttpError(502, f"workers failed {what}: {listed}", code="workers_failed")

    async def _hedged(self, worker: Worker, generation: Generation, relay: Relay, course: Course) -> tuple[Relay, str]:
        """Send the call to a worker and, where it delivers nothing within `hedge_after_s`, to a second one too. Returns
        the side of the client that counts, with its error or ""."""
        after_s = self._config.hedge_after_s
        if after_s is None or relay.has_begun or not generation.may_be_sent_twice:
            return relay, await self._counted(worker, generation, relay, course)

        def second() -> tuple[Relay, Coroutine[Any, Any, str]] | None:
            if (twin := self._choosing.twin(worker, course)) is None:
                return None
            other = relay.beside(twin)
            return other, self._counted(twin, generation, other, course)

        race = Race(relay, self._counted(worker, generation, relay, course))
        try:
            return await race.run(after_s, second)
        finally:
            if race.has_second and race.winner is not None:
                self._counters.hedges[race.winner is not relay] += 1

    async def _counted(self, worker: Worker, generation: Generation, relay: Relay, course: Course) -> str:
        """Count the attempt, and its outcome at a worker that is still there, see `_try`."""
        try:
            with worker.running(generation.num_sequences):
                return await self._try(worker, generation, relay, course)
        finally:
            if worker in self._registry:  # else the labels of a removed worker would come back
                self._counters.requests[worker.url, relay.outcome] += 1

    async def _try(self, worker: Worker, generation: Generation, relay: Relay, course: Course) -> str:
        """Send the call to a worker. Returns the error or ""; the relay has the outcome. The client is not told of an
        error before the answer has begun."""
        why, call, progress = "", generation.call, generation.progress
        try:
            async with asyncio.timeout(0.0 if self._is_ending else course.deadline - time.monotonic()) as limit:
                self._limits.add(limit)
                try:
                    await self._attempt(worker, generation, relay)
                finally:
                    self._limits.discard(limit)
        except _Begun as error:
            worker.suspect(str(error))
            if progress is not None and progress.is_done:
                await relay.finish()
            elif progress is not None and progress.why_lost is None and relay.can_go_on:
                relay.outcome, why = Outcome.MOVED, str(error)
                logger.warning("%s goes on elsewhere, since worker %s ended: %s", call.path, worker.url, why)
            else:
                why = f"worker {worker.url} ended in the middle of this answer to {call.path}: {error}"
                if progress is not None and progress.why_lost is not None:
                    why += f"; it cannot go on elsewhere: {progress.why_lost}"
                await relay.fail(why, Outcome.BROKEN)
        except TimeoutError:
            why = f"not answered within {self._config.request_timeout_s:g} s by worker {worker.url}"
            if self._is_ending:
                why = f"the router ended before worker {worker.url} had answered {call.path}"
            await relay.fail(why, Outcome.TIMED_OUT)
        except Drains as error:
            relay.outcome, why = Outcome.DRAINING, str(error)
            if worker.is_alive:
                self._registry.mark_draining(worker)
        except (Full, NoDescriptors) as error:
            relay.outcome, why = Outcome.FULL, str(error)
            course.full[worker.url] = time.monotonic() + error.retry_after_s, why
        except (_WorkerDied, Unavailable, WorkerFailed) as error:
            relay.outcome, why = Outcome.MOVED, str(error)
            worker.suspect(why)
            logger.warning(
                "%s, which had produced nothing, leaves worker %s: %s", call.path, worker.url, why
            )  # fmt: skip
        return why

    async def _pick(self, generation: Generation, course: Course) -> Worker:
        """Choose the worker for a request. Waits while there is none, or all are full. Raises HttpError 503, and
        Aborted."""
        started = time.monotonic()
        deadline = min(course.deadline, started + max(0.0, self._config.queue_timeout_s - course.waited_s))
        try:
            async with self.held.abortable(generation.call, _open_rids(generation)):
                return await self._wait_for_worker(generation, course, deadline)
        finally:
            course.waited_s += time.monotonic() - started

    async def _wait_for_worker(self, generation: Generation, course: Course, deadline: float) -> Worker:
        while (found := self._all_full(generation, course)) is not None:
            until, why = found
            if until > deadline:
                after = str(math.ceil(until - time.monotonic()))
                raise HttpError(503, f"all workers are full: {why}", code="overloaded",
                                headers={"Retry-After": after})  # fmt: skip
            await self.held.pause(until, why)
        if (progress := generation.progress) is not None and course.has_begun:
            return await self.held.its_worker(
                lambda: self._choosing.like(progress, course), deadline,
                lambda: self._choosing.why_none_like(progress), lambda: self._choosing.maybe_like(progress),
            )  # fmt: skip
        if (session := generation.session) is not None:
            home = home_of(self._registry, session, generation.call.path)
            return await self.held.its_worker(
                lambda: self._home(generation, course), deadline, lambda: why_none([home]), lambda: [home]
            )
        return await self.held.worker(lambda: self._choosing.best(generation, course), deadline)

    def _home(self, generation: Generation, course: Course) -> Worker | None:
        """Return the worker of a session; None while it takes no requests. Raises HttpError 404 where it is lost, 502
        where it failed this request: another one cannot answer it, and this one may have done so."""
        assert generation.session is not None
        worker = home_of(self._registry, generation.session, generation.call.path)
        if course.failures:
            why = "; ".join(f"{url}: {why}" for url, why in course.failures)
            raise HttpError(502, f"the worker of the session failed: {why}", code="workers_failed")
        return worker if worker.can_take_requests or worker.is_draining else None

    def _all_full(self, generation: Generation, course: Course) -> tuple[float, str] | None:
        """Return when the first worker may be asked again, and why all refuse now; None where one may be asked."""
        session, progress = generation.session, generation.progress
        path = generation.call.path
        workers = list(self._registry) if session is None else [home_of(self._registry, session, path)]
        if progress is not None and course.has_begun:
            workers = [worker for worker in workers if progress.why_not(worker) is None]
        able = [worker for worker in workers if worker.can_take_requests]
        if not course.full or not able or not all(map(course.is_full, able)):
            return None
        said = "; ".join(f"{worker.url}: {course.full[worker.url][1]}" for worker in able)
        return min(course.full[worker.url][0] for worker in able), said

    async def _attempt(self, worker: Worker, generation: Generation, relay: Relay) -> None:
        """Forward the call until the answer ends or the worker dies. Raises _Begun for an error after the client has
        received a part of the answer; otherwise raises the error itself, and nothing was sent."""
        passing = asyncio.create_task(self._pass_through(worker, generation, relay))
        try:
            if not await first_of(passing, self._until_lost(worker, generation, relay)):
                raise _WorkerDied("it drains" if worker.is_alive else worker.last_error or "it is dead")
            passing.result()
        except (_WorkerDied, WorkerFailed) as error:
            if relay.has_begun and not isinstance(error, NoDescriptors):
                raise _Begun(str(error)) from error
            raise

    async def _until_lost(self, worker: Worker, generation: Generation, relay: Relay) -> None:
        """Wait until the worker dies, or drains while another one can surely go on with the stream at once."""
        died, progress = worker.died, generation.progress
        if progress is not None:
            await first_of(asyncio.ensure_future(worker.drains.wait()), died.wait())
            is_movable = progress.why_lost is None and progress.doubt is None
            if relay.can_go_on and is_movable and self._choosing.has_room_for(progress):
                return
        await died.wait()

    async def _pass_through(self, worker: Worker, generation: Generation, relay: Relay) -> None:
        call, progress = generation.call_at(worker), generation.progress
        if goes_on := progress is not None and relay.has_begun:
            call = replace(call, body=await _with_begun(call.body, progress, worker))
        async with self._wire.call(worker.url, call) as answer:
            if answer.status_code == 503:
                body = await beginning(answer, _MAX_REFUSAL_BYTES)
                error = refusal(body, answer.headers.get("retry-after", ""))
                if isinstance(error, Drains | Full) or not relay.is_last:
                    raise error
                await relay.whole(answer, body)
            elif is_stream(answer):
                await self._passing.events(answer, relay, progress)
            elif goes_on:
                body = await beginning(answer, _MAX_REFUSAL_BYTES)
                if answer.status_code != _TOO_LONG:
                    worker.forget_weights()
                raise WorkerFailed(f"it answered {answer.status_code}: {body.decode(errors='replace')}")
            else:
                await self._passing.whole(answer, relay)


async def _with_begun(body: bytes, progress: Progress, worker: Worker) -> bytes:
    """Return the body by which a worker goes on with a stream. A long one is made on a thread: all streams of a worker
    that has ended come at once."""

    def make() -> bytes:
        return with_fields(body, {"begun": progress.begun_at(worker)})

    return await off_loop(make) if progress.num_tokens > _MANY_TOKENS else make()


def _open_rids(generation: Generation) -> Collection[str]:
    """Return the ids that a request's prompts without a whole answer have at its worker, those of all prompts where
    only the end of the stream is missing; none where it told none."""
    progress = generation.progress
    return () if progress is None else progress.open_rids or progress.rids


def _ending(why: str) -> HttpError:
    return HttpError(503, why, code="ending", headers={"Retry-After": "1"})
