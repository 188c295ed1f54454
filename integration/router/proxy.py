"""The forwarding of a request to one worker, or to another one if the first fails before it has produced output.

An answer that is no event stream is forwarded when it is complete, so until then the request can move; the part of it
that the router has no memory for is passed on as it comes. A stream is forwarded event by event. After its first event,
the failure of its worker ends it with an error event, and without [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

import httpx
from starlette.types import Send

from ..http.edge.disconnect import first_of
from ..http.edge.errors import HttpError
from .budget import Budget
from .calls import WorkerCall
from .config import RouterConfig
from .counters import Affinity, Outcome, RouterCounters
from .fleet.balance import PrefixTable, WorkerLoad, choose
from .fleet.held import HeldRequests
from .fleet.workers import Worker, WorkerRegistry
from .relay import Drains, Full, Relay, Unavailable, refusal
from .sessions import home_of
from .wire import Wire, WorkerFailed, beginning

logger = logging.getLogger(__name__)

_END_OF_EVENT = b"\n\n"
_MAX_REFUSAL_BYTES = 1 << 16  # of a 503 that are read, before the request moves or the answer is passed on


@dataclass(frozen=True)
class Generation:
    """A call with the values that determine the choice of its worker."""

    call: WorkerCall
    keys: tuple[bytes, ...]  # keys of its prompt, see `balance.prompt_keys`
    num_sequences: int
    session: str | None = None  # that lives on one worker, see `sessions`


@dataclass
class _Course:
    """The course of one request so far."""

    deadline: float  # time.monotonic
    failures: list[tuple[str, str]] = field(default_factory=list)  # URL and reason of each attempt that failed
    num_sent: int = 0  # times that it was sent to a worker
    waited_s: float = 0.0  # for a worker
    full: dict[str, tuple[float, str]] = field(default_factory=dict)  # by URL: until when (time.monotonic), and why

    def is_full(self, worker: Worker) -> bool:
        """Return whether this worker has refused the request because it is full, and wants to be left alone still."""
        return self.full.get(worker.url, (0.0, ""))[0] > time.monotonic()


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
        self._prefixes = PrefixTable(config.max_prefixes)
        self._answers = Budget(config.max_kept_answer_bytes)
        self._limits: set[asyncio.Timeout] = set()  # of the open attempts
        self._is_ending = False
        self.held = HeldRequests(registry, config.max_held_requests)

    def forget(self, worker: Worker) -> None:
        """Forget the prompts of a worker whose cache is lost."""
        self._prefixes.forget(worker.id)

    def end(self) -> None:
        """End all open requests with an error, because the router ends."""
        self._is_ending = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)

    async def run(self, generation: Generation, send: Send) -> None:
        """Answer the request. Raises HttpError, before anything was sent, if no worker could answer."""
        try:
            await self._run(generation, send)
        except HttpError as error:
            self._counters.unanswered[error.code or str(error.status)] += 1
            raise

    async def _run(self, generation: Generation, send: Send) -> None:
        course = _Course(time.monotonic() + self._config.request_timeout_s)
        while len(course.failures) < self._config.max_attempts:
            worker = await self._pick(generation, course)
            self._counters.num_retries += course.num_sent > 0
            course.num_sent += 1
            relay = Relay(send, worker, is_last=len(course.failures) + 1 == self._config.max_attempts)
            try:
                with worker.running(generation.num_sequences):
                    why = await self._try(worker, generation.call, relay, course)
            finally:
                self._counters.requests[worker.url, relay.outcome] += 1
            if relay.outcome is Outcome.TIMED_OUT and not relay.has_begun:
                raise HttpError(504, why, code="timeout") if not self._is_ending else _ending(why)
            if relay.outcome is Outcome.MOVED:
                course.failures.append((worker.url, why))
            elif relay.outcome not in (Outcome.DRAINING, Outcome.FULL):  # no attempts: the worker has begun nothing
                return
        listed = "; ".join(f"{url}: {why}" for url, why in course.failures)
        raise HttpError(502, f"workers failed before they produced anything: {listed}", code="workers_failed")

    async def _try(self, worker: Worker, call: WorkerCall, relay: Relay, course: _Course) -> str:
        """Send the call to a worker. Returns the error or ""; the relay has the outcome. The client is not told of an
        error before the answer has begun."""
        why = ""
        try:
            async with asyncio.timeout(0.0 if self._is_ending else course.deadline - time.monotonic()) as limit:
                self._limits.add(limit)
                try:
                    await self._attempt(worker, call, relay)
                finally:
                    self._limits.discard(limit)
        except _Begun as error:
            worker.suspect(str(error))
            why = f"worker {worker.url} ended in the middle of this answer to {call.path}: {error}"
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
        except Full as error:
            relay.outcome, why = Outcome.FULL, str(error)
            course.full[worker.url] = time.monotonic() + error.retry_after_s, why
        except (_WorkerDied, Unavailable, WorkerFailed) as error:
            relay.outcome, why = Outcome.MOVED, str(error)
            worker.suspect(why)
            logger.warning(
                "%s, which had produced nothing, leaves worker %s: %s", call.path, worker.url, why
            )  # fmt: skip
        return why

    async def _pick(self, generation: Generation, course: _Course) -> Worker:
        """Choose the worker for a request. Waits while there is none, or all are full. Raises HttpError 503."""
        started = time.monotonic()
        deadline = min(course.deadline, started + max(0.0, self._config.queue_timeout_s - course.waited_s))
        try:
            while (found := self._all_full(generation, course)) is not None:
                until, why = found
                if until > deadline:
                    after = str(math.ceil(until - time.monotonic()))
                    raise HttpError(503, f"all workers are full: {why}", code="overloaded",
                                    headers={"Retry-After": after})  # fmt: skip
                await self.held.pause(until, why)
            if generation.session is not None:
                session = generation.session
                return await self.held.its_worker(lambda: self._home(session, course), deadline)
            return await self.held.worker(lambda: self._choose(generation, course), deadline)
        finally:
            course.waited_s += time.monotonic() - started

    async def any_worker(self) -> Worker:
        """Return the worker for a new session. Waits while there is none. Raises HttpError 503."""
        call = WorkerCall("POST", "", "", (), b"")
        return await self._pick(Generation(call, (), 1), _Course(time.monotonic() + self._config.request_timeout_s))

    def _home(self, session: str, course: _Course) -> Worker | None:
        """Return the worker of a session; None while it takes no requests. Raises HttpError 404 where it is lost, 502
        where it failed this request: another one cannot answer it, and this one may have done so."""
        worker = home_of(self._registry, session)
        if course.failures:
            why = "; ".join(f"{url}: {why}" for url, why in course.failures)
            raise HttpError(502, f"the worker of the session failed: {why}", code="workers_failed")
        return worker if worker.can_take_requests else None

    def _all_full(self, generation: Generation, course: _Course) -> tuple[float, str] | None:
        """Return when the first worker may be asked again, and why all refuse now; None where one may be asked."""
        session = generation.session
        workers = list(self._registry) if session is None else [home_of(self._registry, session)]
        able = [worker for worker in workers if worker.can_take_requests]
        if not course.full or not able or not all(map(course.is_full, able)):
            return None
        said = "; ".join(f"{worker.url}: {course.full[worker.url][1]}" for worker in able)
        return min(course.full[worker.url][0] for worker in able), said

    def _choose(self, generation: Generation, course: _Course) -> Worker | None:
        tried = {url for url, _ in course.failures}
        able = [worker for worker in self._registry if worker.can_take_requests]
        able = [worker for worker in able if not course.is_full(worker)] or able
        # A worker that failed this request gets it again only if a probe has found it well since.
        able = [one for one in able if one.url not in tried] or [one for one in able if not one.is_suspect]
        # Requests wait in a paused engine, so one is chosen only if all engines are paused.
        able = [worker for worker in able if not worker.paused] or able
        if not able:
            return None
        knowing = self._prefixes.knowing(generation.keys)
        loads = [WorkerLoad(worker.id, worker.num_running, worker.num_routed) for worker in able]
        worker = self._registry.find(choose(loads, knowing, self._config.affinity_slack))
        is_known = any(one.id in knowing for one in able)
        hit = Affinity.HIT if worker.id in knowing else Affinity.TOO_BUSY if is_known else Affinity.UNKNOWN
        self._counters.affinity[hit] += 1
        self._prefixes.record(generation.keys, worker.id)
        return worker

    async def _attempt(self, worker: Worker, call: WorkerCall, relay: Relay) -> None:
        """Forward the call until the answer ends or the worker dies. Raises _Begun for an error after the client has
        received a part of the answer; otherwise raises the error itself, and nothing was sent."""
        passing = asyncio.create_task(self._pass_through(worker, call, relay))
        try:
            if not await first_of(passing, worker.died.wait()):
                raise _WorkerDied(worker.last_error or "it is dead")
            passing.result()
        except (_WorkerDied, WorkerFailed) as error:
            if relay.has_begun:
                raise _Begun(str(error)) from error
            raise

    async def _pass_through(self, worker: Worker, call: WorkerCall, relay: Relay) -> None:
        async with self._wire.call(worker.url, call) as answer:
            if answer.status_code == 503:
                body = await beginning(answer, _MAX_REFUSAL_BYTES)
                error = refusal(body, answer.headers.get("retry-after", ""))
                if isinstance(error, Drains | Full) or not relay.is_last:
                    raise error
                await relay.whole(answer, body)
            elif answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_events(answer, relay)
            else:
                await self._pass_whole(answer, relay)

    async def _pass_whole(self, answer: httpx.Response, relay: Relay) -> None:
        """Forward an answer when it is complete. The answer for which memory is short is passed on as it comes."""
        declared = answer.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else None
        body = bytearray()
        with self._answers.share() as kept:
            async for part in answer.aiter_raw():
                body += part
                if relay.has_begun or not kept.resize(len(body)):
                    await relay.part(answer, bytes(body), num_bytes)
                    body.clear()
                    kept.resize(0)
            if relay.has_begun:
                await relay.end(answer, b"")
            else:
                await relay.whole(answer, bytes(body))

    async def _pass_events(self, answer: httpx.Response, relay: Relay) -> None:
        """Forward a stream event by event. The event for which memory is short is passed on as it comes."""
        rest = bytearray()
        with self._answers.share() as kept:
            async for part in answer.aiter_raw():
                start = max(0, len(rest) - 1)  # the end of an event may be in two parts
                rest += part
                end = rest.rfind(_END_OF_EVENT, start) + len(_END_OF_EVENT)
                if end >= len(_END_OF_EVENT):
                    await relay.events(answer, bytes(rest[:end]))
                    del rest[:end]
                if not kept.resize(len(rest)):
                    await relay.part(answer, bytes(rest))
                    rest.clear()
                    kept.resize(0)
            await relay.end(answer, bytes(rest))


def _ending(why: str) -> HttpError:
    return HttpError(503, why, code="ending", headers={"Retry-After": "1"})
