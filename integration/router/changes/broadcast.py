"""The same call to many workers at once, and what came back."""

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

_MARGIN_S = 2.0  # beyond a call's own deadline: the worker's answer says more than our silence
_MAX_TEXT = 2000  # characters of an error that is no JSON
_RETRYABLE = frozenset({409, 429, 503})  # the worker did nothing


@dataclass(frozen=True)
class Result:
    """What one worker said."""

    worker: Worker
    status: int | None  # None: it did not answer
    body: object = None  # JSON, or its beginning as text
    error: str | None = None  # why it did not answer
    was_received: bool = True  # False: it never got the call

    @property
    def success(self) -> bool:
        """2xx, and not an object that says otherwise."""
        said_no = isinstance(self.body, dict) and self.body.get("success") is False
        return self.status is not None and 200 <= self.status < 300 and not said_no

    @property
    def is_refusal(self) -> bool:
        """The worker answered that it did not do it."""
        return not self.success and self.status is not None and self.status < 500

    @property
    def is_retryable(self) -> bool:
        return self.success or not self.was_received or self.status in _RETRYABLE

    @property
    def message(self) -> str:
        """Its own words about how it went."""
        if self.error is not None:
            return self.error
        if isinstance(self.body, dict):
            error = self.body.get("error")
            said = self.body.get("message") or (error.get("message") if isinstance(error, dict) else error)
            return str(said) if said else ""
        return "" if self.body is None else str(self.body).strip()

    @property
    def kind(self) -> str:
        """The error's name for programs."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("type") or "") if isinstance(error, dict) else ""

    def report(self) -> dict[str, object]:
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
    """Call every worker at once; the results in their order. Never raises for what a worker does.

    bodies: by worker id, where they differ. A worker that is given up by the health checks is not waited for.
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
    """One status and one body for all of them.

    200: all succeeded; what all their bodies have in common stands in this one. A 4xx or 501: all of them answered so.
    502: anything else. `results` has each worker's own.
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
    """What JSON values agree in: objects by key, anything else as a whole; None where they agree in nothing."""
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
    """The body with one field changed."""
    return json.dumps({**body, name: value}).encode()
