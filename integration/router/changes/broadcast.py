"""One call to many workers at once, and their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from ...http.edge.errors import HttpError, error_body
from ...one_line import in_one_line
from ..calls import WorkerCall
from ..fleet.workers import Worker

_MARGIN_S = 2.0  # wait this much longer than a call's own deadline, so that the worker can answer why it failed
_MAX_TEXT = 2000  # characters of an error that is no JSON
_RETRYABLE = frozenset({409, 429, 503})  # the worker did nothing


@dataclass(frozen=True)
class Result:
    """The result of a call at one worker."""

    worker: Worker
    status: int | None  # None: it did not answer
    body: object = None  # JSON, or its beginning as text
    error: str | None = None  # reason for which it did not answer
    was_received: bool = True  # False: the call did not reach it

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
        return "" if self.body is None else str(self.body).strip()

    @property
    def kind(self) -> str:
        """The error's type, "" without one."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("type") or "") if isinstance(error, dict) else ""

    def report(self) -> dict[str, object]:
        """Return its entry in `results` of an answer."""
        told = {"error": self.error} if self.error is not None else {"body": self.body}
        return {
            "worker": self.worker.url, "worker_id": self.worker.id, "success": self.success,
            "status_code": self.status, **told,
        }  # fmt: skip


async def broadcast(
    client: httpx.AsyncClient,
    workers: Sequence[Worker],
    call: WorkerCall,
    timeout_s: float,
    bodies: Mapping[str, bytes] | None = None,
) -> list[Result]:
    """Call all workers at once. Returns their results in the order of the workers. Raises nothing for a worker's error.

    bodies: by worker id, where they differ. A worker that the health checks find dead is not waited for.
    """
    return await asyncio.gather(
        *(_ask(client, worker, call, timeout_s, (bodies or {}).get(worker.id, call.body)) for worker in workers)
    )


async def _ask(client: httpx.AsyncClient, worker: Worker, call: WorkerCall, timeout_s: float, body: bytes) -> Result:
    died = worker.died
    asking = asyncio.create_task(
        client.request(call.method, worker.url + call.target, headers=list(call.headers), content=body)
    )
    death = asyncio.create_task(died.wait())
    try:
        done, _ = await asyncio.wait(
            {asking, death}, timeout=timeout_s + _MARGIN_S, return_when=asyncio.FIRST_COMPLETED
        )
        if asking in done:
            answer = asking.result()
            return Result(worker, answer.status_code, _value(answer))
        why = f"it died: {worker.last_error}" if death in done else f"timed out: no answer within {timeout_s:g} s"
        return Result(worker, None, error=why)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        worker.suspect(in_one_line(error))
        return Result(worker, None, error=f"not reached: {in_one_line(error)}", was_received=False)
    except httpx.HTTPError as error:
        worker.suspect(in_one_line(error))
        return Result(worker, None, error=f"no answer: {in_one_line(error)}")
    finally:
        for task in (asking, death):
            task.cancel()
        await asyncio.gather(asking, death, return_exceptions=True)


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


def common(values: Sequence[object]) -> object:
    """Return the common part of JSON values: objects by key, other values as a whole; None without a common part."""
    first = values[0]
    if all(isinstance(value, dict) for value in values):
        shared = {}
        for key in first:  # type: ignore[attr-defined]
            if all(key in value for value in values):  # type: ignore[operator]
                parts = [value[key] for value in values]  # type: ignore[index]
                part = common(parts)
                if part is not None or all(one is None for one in parts):
                    shared[key] = part
        return shared
    return first if all(value == first and type(value) is type(first) for value in values) else None


def _value(answer: httpx.Response) -> object:
    if not answer.content:
        return None
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return answer.text if answer.is_success else answer.text[:_MAX_TEXT]


def with_value(body: Mapping[str, object], name: str, value: object) -> bytes:
    """Encode the body with one field changed."""
    return json.dumps({**body, name: value}).encode()
