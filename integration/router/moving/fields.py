"""Fields that a router adds to a request: its seed, and what a worker needs to go on with a begun answer.

They are written before the client's own, without a parse of the body: of two equal names in a JSON object the last one
counts, so a field that the client has sent stays as it is.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace

from ...http.edge.json_slices import encode_in_slices
from ...http.edge.session_paths import OPENS
from ..calls import WorkerCall

PATHS = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate"}
)
_JSON = json.JSONEncoder(separators=(",", ":"))
_SPACE = re.compile(rb"[ \t\r\n]*")


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return a JSON object with further fields at its beginning; a body that is none as it is. Long fields are written
    in slices, between which a thread gives way."""
    start = _end_of_space(body, 0)
    if body[start : start + 1] != b"{" or not fields:
        return body
    given = "".join(encode_in_slices(fields, _JSON.encode))[1:-1].encode()
    at = _end_of_space(body, start + 1)
    comma = b"" if body[at : at + 1] == b"}" else b","
    return b"".join((body[: start + 1], given, comma, body[start + 1 :]))


def _end_of_space(body: bytes, start: int) -> int:
    space = _SPACE.match(body, start)
    assert space is not None  # it matches nothing, too
    return space.end()


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
