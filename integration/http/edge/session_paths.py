"""Paths of a session: /sessions/{id}/v1/chat/completions is /v1/chat/completions, and its answer a turn of the session.

So a client that knows nothing of sessions has one by its base URL. A middleware takes the prefix away before keys are
checked and routes found: the call has the level, the errors and the counters of the path without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote_to_bytes

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import BadField, error_response, no_path

PREFIX = "/sessions/"
FIELD = "session_params"
MAX_ID = 256  # characters
OPENS = "opens_session"  # a field of a body: false where the session must be open already, as behind a router
PATHS = frozenset(
    {"/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/completions",
     "/v1/models", "/generate"}
)  # fmt: skip
_BELOW = ("/v1/models/", "/v1/messages/", "/v1/responses/")  # paths of models, and of parts that are not supported
_KEY = "lockstep.session"  # of the scope: the id as it was sent


class SessionPaths:
    """Pass calls under the paths of sessions on without the prefix. Other paths stay as they are."""

    def __init__(self, app: ASGIApp, *, only: bool = False) -> None:
        """Wrap the application. only: there are no other paths, as for callers that know nothing but a session's id."""
        self._app, self._only = app, only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (self._only or scope["path"].startswith(PREFIX)):
            raw = scope["raw_path"]
            given, slash, rest = raw.removeprefix(PREFIX.encode()).partition(b"/")
            path = unquote_to_bytes(slash + rest).decode("utf-8", "replace")
            if raw.startswith(PREFIX.encode()) and (path in PATHS or path.startswith(_BELOW)):
                scope = {**scope, "path": path, "raw_path": slash + rest, _KEY: given}
            elif self._only:
                await error_response(scope["path"], no_path(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def session_in(scope: Scope) -> str | None:
    """Return the id of the session that the path of a call names; None: it names none. Raises BadField for an id that
    no session has."""
    given = scope.get(_KEY)
    if given is None:
        return None
    try:
        id = unquote_to_bytes(given).decode()
    except UnicodeDecodeError:
        id = ""
    if not 0 < len(id) <= MAX_ID or not id.isprintable() or id in (".", ".."):
        raise BadField(
            f"{FIELD}.id", f"the path must name it by 1 to {MAX_ID} printable characters, percent-encoded as UTF-8, "
            f"which are neither . nor .., not {given[:100].decode('ascii', 'replace')!r}"
        )  # fmt: skip
    return id


def path_of(id: str, path: str) -> str:
    """Return the path of a session's call."""
    return f"{PREFIX}{quote(id, safe='')}{path}"


def with_session(scope: Scope, values: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a generation with the session that its path names, if it names one: the messages are the
    whole conversation. The fields may say otherwise. Raises BadField."""
    found = dict(values)
    opens = found.pop(OPENS, True)
    if (id := session_in(scope)) is None:
        return found
    given = found.get(FIELD) or {}
    if not isinstance(given, Mapping):
        raise BadField(FIELD, f"must be an object, not {type(given).__name__}")
    if given.get("id", id) != id:
        raise BadField(f"{FIELD}.id", f"is {str(given['id'])[:300]!r}, and the path names the session {id[:300]!r}")
    return {**found, FIELD: {"messages": "all", "open": bool(opens), **given, "id": id}}
