"""Sessions of conversations behind a router: each lives on one worker, and its id begins with the worker's.

    /open_session {"session_id": "mine"}  ->  "3f0c….mine", opened at the worker 3f0c…

So the router remembers nothing: a router that was restarted, or another one over the same workers, finds the worker by
the id. A session ends with the process of its worker.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from ..http.edge.bodies import parse_object_off_loop, parsed
from ..http.edge.errors import BadField, HttpError
from .calls import WorkerCall
from .fleet.worker import Health, Worker
from .fleet.workers import WorkerRegistry
from .moving.fields import with_fields

OPEN, CLOSE = "/open_session", "/close_session"
_AT_THE_END = ("/session_info", CLOSE)  # that a worker answers while it drains
_MARK = "."  # between the worker's id and the rest
_MAX_ID = 200  # characters of the rest: a worker takes 256 in all
_FIELD = b'"session_params"'


async def session_of(call: WorkerCall, max_lists: int) -> str | None:
    """Return the id of the session that a request names, in its path or in its body; None: it names none. Raises
    HttpError for a body that is no JSON object, if it has to be read."""
    if call.session is not None:
        return call.session
    if call.path == "/session_info":
        return next(iter(parse_qs(call.query).get("session_id", ())), "")
    if call.path == CLOSE:
        given: object = (await parse_object_off_loop(call.body, max_lists)).get("session_id")
    elif _FIELD in call.body:
        params = (await parse_object_off_loop(call.body, max_lists)).get("session_params")
        given = params.get("id") if isinstance(params, Mapping) else None
    else:
        return None
    return given if isinstance(given, str) else None  # a worker says what is wrong with another value


@dataclass(frozen=True)
class Opening:
    """A session to be opened, at whichever worker takes it."""

    fields: bytes  # the client's body, without the session's id
    name: str  # the session's, behind the worker's id

    def body_at(self, worker: Worker) -> bytes:
        """Make the body of the call that opens it at a worker."""
        return with_fields(self.fields, {"session_id": f"{worker.id}{_MARK}{self.name}"})


async def opening(call: WorkerCall, max_lists: int) -> Opening:
    """Read the session that a call opens. Raises HttpError 400 for a bad one."""
    return await parsed(call.body, max_lists, _opening)  # a long one is also written on the thread


def _opening(values: Mapping[str, object]) -> Opening:
    own = values.get("session_id")
    if own is None:
        own = uuid.uuid4().hex
    if not isinstance(own, str) or not 0 < len(own) <= _MAX_ID or not own.isprintable():
        raise BadField("session_id", f"must be a text of 1 to {_MAX_ID} printable characters")
    fields = {name: value for name, value in values.items() if name != "session_id"}
    return Opening(json.dumps(fields).encode(), own)


def home_of(registry: WorkerRegistry, session: str, path: str) -> Worker:
    """Return the worker of a session for a call of this path. Raises HttpError 404 where it cannot be any more, or was
    never here: a worker that drains takes no request that goes on with its sessions, and does not become well again."""
    worker_id, mark, _ = session.partition(_MARK)
    worker = next((one for one in registry if one.id == worker_id), None)
    if worker is None and not (mark and _is_worker_id(worker_id)):
        raise HttpError(
            404, f"the session {session[:300]!r} is unknown: open it with {OPEN}, and use the id that it answers",
            code="session_unknown",
        )  # fmt: skip
    if worker is None:
        why = "its worker is none of this router's"
    elif worker.health is Health.DEAD:
        why = f"its worker {worker.url} has ended ({worker.last_error})"
    elif worker.is_draining and path not in _AT_THE_END:
        why = f"its worker {worker.url} drains; until it ends GET /session_info returns the conversation"
    else:
        return worker
    raise HttpError(404, f"the session {session[:300]!r} is lost: {why}", code="session_lost")


def _is_worker_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
