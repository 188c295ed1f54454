"""One call to many workers at once, and their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....rollout.giving_way import give_way
from ...http.edge.bodies import let_go, off_loop
from ...http.edge.disconnect import first_of
from ...http.edge.errors import HttpError, error_body
from ...http.edge.json_slices import encode_in_slices, parse_in_slices
from ..calls import WorkerCall
from ..fleet.worker import Worker
from ..wire import Answer, NotReached, Wire, WorkerFailed, words_of

_MARGIN_S = 2.0  # wait this much longer than a call's own deadline, so that the worker can answer why it failed
_MAX_TEXT = 2000  # characters of an error that is no JSON
_MAX_REPORT = 1 << 16  # characters of another answer that is no JSON
_MAX_BYTES = 4  # of a character
_MAX_DEPTH = 50  # levels of objects that are compared key by key
_LONG_BYTES = 1 << 16  # longer answers are parsed and merged in a thread, so that other requests go on
_ENTRIES_A_SLICE = 1 << 6  # of a list that are compared at once
_FEW = 16  # entries of a list, each of which may be a long one
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_RETRYABLE = frozenset({409, 429, 503})  # the worker did nothing
_ENDING = frozenset({"draining", "engine_stopped", "rank_failure"})  # words of a worker that will serve no more
_DID_NOTHING = _ENDING | {"overloaded"}


@dataclass(frozen=True)
class Result:
    """The result of a call at one worker."""

    worker: Worker
    status: int | None  # None: it did not answer
    body: object = None  # JSON, or its beginning as text
    error: str | None = None  # reason for which it did not answer
    was_received: bool = True  # False: the call did not reach it
    num_bytes: int = 0  # of its answer

    @property
    def success(self) -> bool:
        """Whether the status is 2xx and the body does not have `success: false`."""
        said_no = isinstance(self.body, dict) and self.body.get("success") is False
        return self.status is not None and 200 <= self.status < 300 and not said_no

    @property
    def is_refusal(self) -> bool:
        """Whether the worker answered that it did not run the verb."""
        return not self.success and self.status is not None and self.status < 500

    @property
    def is_ending(self) -> bool:
        """Whether the worker answered that it takes no calls any more, since its process ends."""
        return self.status == 503 and not _ENDING.isdisjoint(words_of(self.body))

    @property
    def did_nothing(self) -> bool:
        """Whether the worker answered that it did not run the verb, also because it is full, or ends."""
        is_unable = self.status == 503 and not _DID_NOTHING.isdisjoint(words_of(self.body))
        return self.is_refusal or is_unable

    @property
    def is_retryable(self) -> bool:
        """Whether the call may be sent again: it succeeded, or the worker did nothing."""
        return self.success or not self.was_received or self.status in _RETRYABLE

    @property
    def message(self) -> str:
        """The worker's message, or the reason for which it did not answer."""
        if self.error is not None:
            return self.error
        if isinstance(self.body, dict):
            error = self.body.get("error")
            said = self.body.get("message") or (error.get("message") if isinstance(error, dict) else error)
            return str(said) if said else ""
        return self.body.strip() if isinstance(self.body, str) else ""

    @property
    def kind(self) -> str:
        """The error's type, "" without one."""
        return self._of_error("type")

    @property
    def code(self) -> str:
        """The error's code, "" without one."""
        return self._of_error("code")

    def report(self) -> dict[str, object]:
        """Return its entry in `results` of an answer."""
        told = {"error": self.error} if self.error is not None else {"body": self.body}
        return {
            "worker": self.worker.url, "worker_id": self.worker.id, "success": self.success,
            "status_code": self.status, **told,
        }  # fmt: skip

    def _of_error(self, name: str) -> str:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get(name) or "") if isinstance(error, dict) else ""


async def broadcast(
    wire: Wire,
    workers: Sequence[Worker],
    call: WorkerCall,
    timeout_s: float,
    max_bytes: int,
    bodies: Mapping[str, bytes] | None = None,
) -> list[Result]:
    """Call all workers at once. Returns their results in the order of the workers. Raises nothing for a worker's error.

    max_bytes: of an answer. bodies: by worker id, where they differ. A worker that the health checks find dead is not
    waited for.
    """
    calls = (replace(call, body=bodies[worker.id]) if bodies else call for worker in workers)
    return await asyncio.gather(
        *(_ask(wire, worker, one, timeout_s, max_bytes) for worker, one in zip(workers, calls, strict=True))
    )


async def _ask(wire: Wire, worker: Worker, call: WorkerCall, timeout_s: float, max_bytes: int) -> Result:
    asking = asyncio.create_task(wire.fetch(worker.url, call, max_bytes, timeout_s + _MARGIN_S))
    try:
        if not await first_of(asking, worker.died.wait()):
            return Result(worker, None, error=f"it died: {worker.last_error}")
        answer = asking.result()
        num_bytes = len(answer.body)
        value = await off_loop(partial(_value, answer)) if num_bytes > _LONG_BYTES else _value(answer)
        return Result(worker, answer.status, value, num_bytes=num_bytes)
    except NotReached as error:
        worker.suspect(str(error))
        return Result(worker, None, error=f"not reached: {error}", was_received=False)
    except WorkerFailed as error:
        worker.suspect(str(error))
        return Result(worker, None, error=f"{call.path}: {error}")
    except HttpError as error:
        return Result(worker, None, error=error.message, was_received=False)


def summarise(results: Sequence[Result]) -> tuple[int, dict[str, object]]:
    """Combine the results into one status and one body.

    200: all succeeded; the body has the values that all their bodies have in common. A 4xx or 501: all answered with
    it. 502: anything else. `results` of the body has each worker's own result.
    """
    reports = [result.report() for result in results]
    failed = [result for result in results if not result.success]
    if not failed:
        shared = common([result.body for result in results])
        body = {"success": True, **(shared if isinstance(shared, dict) else {})}
        body.setdefault("message", " | ".join(dict.fromkeys(filter(None, (r.message for r in results)))))
        return 200, {**body, "results": reports}
    statuses = {result.status for result in results}
    [status] = statuses if len(statuses) == 1 else [None]
    alike = len(failed) == len(results) and status is not None and (400 <= status < 500 or status == 501)
    if alike and len({result.message for result in failed}) == 1:
        message = failed[0].message
    else:
        message = "; ".join(f"{r.worker.url}: {r.message or r.status}" for r in failed)
    kinds = {result.kind for result in failed}
    error = HttpError(
        status if alike and status is not None else 502,
        message or "refused",
        code=kinds.pop() if len(kinds) == 1 else "workers_failed",
        extra={"results": reports, "retryable": all(result.is_retryable for result in results)},
    )
    return error.status, error_body(error, openai=False)


def merge(
    results: Sequence[Result], name: str, function: Callable[[list[Any]], object]
) -> tuple[int, dict[str, object]]:
    """Combine one field of all workers' answers into one, as `function` does; as `summarise` where one has none."""
    found = [result.body[name] for result in results if isinstance(result.body, dict) and name in result.body]
    if len(found) < len(results) or any(result.status != 200 for result in results):
        return summarise(results)
    _, body = summarise(results)
    shared = body if all(result.success for result in results) else {"results": body["results"]}
    return 200, {**shared, name: function(found)}


def common(values: Sequence[object], depth: int = _MAX_DEPTH) -> object:
    """Return the common part of JSON values: objects by key, other values as a whole; None without a common part."""
    first = values[0]
    if depth and all(isinstance(value, dict) for value in values):
        shared = {}
        for key in first:  # type: ignore[attr-defined]
            if all(key in value for value in values):  # type: ignore[operator]
                parts = [value[key] for value in values]  # type: ignore[index]
                part = common(parts, depth - 1)
                if part is not None or all(one is None for one in parts):
                    shared[key] = part
        return shared
    return first if all(type(value) is type(first) and _are_equal(value, first) for value in values) else None


def _are_equal(one: object, other: object) -> bool:
    if not isinstance(one, list) or not isinstance(other, list) or len(one) != len(other):
        return one == other
    if len(one) <= _FEW:
        return all(map(_are_equal, one, other))
    for at in range(0, len(one), _ENTRIES_A_SLICE):
        give_way()
        if one[at : at + _ENTRIES_A_SLICE] != other[at : at + _ENTRIES_A_SLICE]:
            return False
    return True


async def encoded(
    results: Sequence[Result], combine: Callable[[Sequence[Result]], tuple[int, dict[str, object]]]
) -> tuple[int, bytes]:
    """Return the status and the body, as JSON, that `combine` makes of results. Those of long answers are made on a
    thread, so that other requests go on; it also lets go of the answers, whose bodies are empty then."""

    def make() -> tuple[int, bytes]:
        status, body = combine(results)
        return status, b"".join(part.encode() for part in encode_in_slices(body, _JSON.encode))

    def make_and_let_go() -> tuple[int, bytes]:
        try:
            return make()
        finally:
            for result in results:
                let_go(result.body if isinstance(result.body, dict) else {"": result.body})

    is_long = sum(result.num_bytes for result in results) > _LONG_BYTES
    return await off_loop(make_and_let_go) if is_long else make()


def _value(answer: Answer) -> object:
    """Return the JSON of an answer, or its text where it is none, or none that the router's own answer can contain."""
    body = answer.body
    if not body:
        return None
    try:
        value = parse_in_slices(body.decode(json.detect_encoding(body)), len(body), parse_constant=_refuse_constant)
        for part in encode_in_slices(value, _JSON.encode):
            part.encode()
    except (ValueError, RecursionError):
        limit = _MAX_REPORT if answer.is_success else _MAX_TEXT
        return body[: _MAX_BYTES * limit].decode("utf-8", "replace")[:limit]
    return value


def _refuse_constant(text: str) -> object:
    raise ValueError(f"JSON has no {text}")


def with_value(body: Mapping[str, object], name: str, value: object) -> bytes:
    """Encode the body with one field changed."""
    return json.dumps({**body, name: value}).encode()
