"""Streams from several servers without a router: where one ends in the middle, another one goes on.

    targets = [HttpTarget("http://a:30000"), HttpTarget("http://b:30000")]
    for event in stream_from(targets, "/generate", {"text": "1+1=", "stream": True}):
        ...

The rules are those of a router (docs/guides/router.md, "Streams that move").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx

from ....weight_sync.target import TargetError
from ...one_line import in_one_line
from ...push.http_target import HttpTarget
from ..calls import WorkerCall
from ..wire import WorkerFailed
from .fields import seeded, with_fields
from .progress import Progress, end_of_events

_MAX_REFUSAL = 1000  # characters of a refusal in an error
_ELSEWHERE = frozenset({409, 500, 502, 503, 504})  # statuses after which another server may answer


@dataclass(frozen=True)
class _Host:
    """A server as it reports itself."""

    weight_digest: str | None
    guarantee: dict[str, object] | None


def stream_from(
    targets: Sequence[HttpTarget],
    path: str,
    body: Mapping[str, object],
    *,
    check: Literal["proven", "trusted"] = "proven",
    timeout_s: float = 600.0,
) -> Iterator[bytes]:
    """Yield the events of one streamed generation, each with its empty line at the end.

    The first target that answers is asked. If it fails before [DONE], the next one goes on where the stream is, with
    the same seed; each target is asked once. check: whether it draws the tokens so far again, or trusts them.
    timeout_s: of each wait. Raises ValueError for a body that is no stream, and TargetError naming each target's
    reason where none can go on, or one refuses the request.
    """
    if body.get("stream") is not True:
        raise ValueError(f"the body of {path} must have stream=true")
    call = seeded(WorkerCall("POST", path, "", (), json.dumps(body).encode()), wants_progress=True)
    progress, whys = Progress(check), []
    has_begun = False  # whether the caller has an event
    for target in targets:
        try:
            for event in _part(target, call, progress, has_begun, timeout_s):
                has_begun = True
                yield event
        except (httpx.HTTPError, WorkerFailed, _Unfit) as error:
            whys.append(f"{target.name}: {in_one_line(error)}")
        else:
            whys.append(f"{target.name}: its stream ended before [DONE]")
        if progress.is_done:
            return
    names = ", ".join(target.name for target in targets)
    raise TargetError(names, path, f"no server could end the stream: {'; '.join(whys)}", "CannotGoOn")


class _Unfit(Exception):
    """The server cannot go on with the stream."""


def _part(
    target: HttpTarget, call: WorkerCall, progress: Progress, has_begun: bool, timeout_s: float
) -> Iterator[bytes]:
    """Yield the events that a server adds to a stream; has_begun: the caller has some already.

    Raises httpx.HTTPError, WorkerFailed and _Unfit where another server may go on, and TargetError where this one
    refuses the request.
    """
    content = call.body
    if has_begun:
        try:
            host = _host(target.server_info(timeout_s))
        except TargetError as error:
            raise _Unfit(error.message) from error
        if why := progress.why_lost or progress.why_not(host):
            raise _Unfit(why)
        content = with_fields(content, {"begun": progress.begun_at(host)})
    with target.stream(call.path, content, timeout_s) as answer:
        if answer.status_code != 200 or not answer.headers.get("content-type", "").startswith("text/event-stream"):
            said = answer.read().decode(errors="replace")[:_MAX_REFUSAL]
            if answer.status_code in _ELSEWHERE:
                raise _Unfit(f"it answered {answer.status_code}: {said}")
            raise TargetError(target.name, call.path, said, str(answer.status_code))
        rest = b""
        for part in answer.iter_raw():
            rest += part
            end = progress.end_of_groups(rest[: end_of_events(rest)])
            for event, notes in progress.read(rest[:end]):
                progress.add(notes)  # before the caller has it: it may never ask for the next one
                yield event
            rest = rest[end:]


def _host(info: Mapping[str, object]) -> _Host:
    digest, guarantee = info.get("weight_digest"), info.get("guarantee")
    return _Host(
        digest if isinstance(digest, str) else None, dict(guarantee) if isinstance(guarantee, Mapping) else None
    )
