"""Fields that a router adds to a request: its seed, and what a worker needs to go on with a begun answer.

They are written before the client's own, without a parse of the body: of two equal names in a JSON object the last one
counts, so a field that the client has sent stays as it is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace

from ...http.edge.session_paths import OPENS
from ..calls import WorkerCall

PATHS = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"}
)
_SPACE = b" \t\r\n"


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return a JSON object with further fields at its beginning; a body that is none as it is."""
    start = len(body) - len(body.lstrip(_SPACE)) if body[:1] in _SPACE else 0
    if body[start : start + 1] != b"{" or not fields:
        return body
    given = json.dumps(fields, separators=(",", ":"))[1:-1].encode()
    at = start + 1
    while body[at : at + 1] and body[at : at + 1] in _SPACE:
        at += 1
    comma = b"" if body[at : at + 1] == b"}" else b","
    return b"".join((body[: start + 1], given, comma, body[start + 1 :]))


def seeded(call: WorkerCall, *, wants_progress: bool) -> WorkerCall:
    """Return a call that completes prompts with a seed for all of them that bring none. The same call sent to two
    workers has the same answer. One under the path of a session opens none, which would be without its history. Other
    calls are returned as they are."""
    if call.method == "GET" or call.path not in PATHS:
        return call
    fields: dict[str, object] = {"default_seed": secrets.randbits(63)}
    if wants_progress:
        fields["progress"] = True
    if call.session is not None:
        fields[OPENS] = False
    return replace(call, body=with_fields(call.body, fields))
