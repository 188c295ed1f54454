"""Aborts of requests that wait for a worker: which ones are meant, and their answers, which no worker makes.

An answer is that of a request which was aborted before its first token. No worker has read its prompt, so it counts no
prompt tokens.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...http.edge.bodies import parse_object_off_loop
from ...http.edge.errors import HttpError
from ..calls import WorkerCall
from .balance import num_sequences

_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/inference/v1/generate": "generate-tokens-",
}
PATHS = frozenset({"/generate", *_PREFIXES})  # of requests that can be aborted
_MAX_SEQUENCES = 1 << 16  # of an answer
_NAMES = (b'"rid"', b'"request_id"')


@dataclass(frozen=True)
class Abort:
    """An abort of requests by the ids that their clients gave them."""

    rids: frozenset[str] | None  # None: of all
    message: str = "Aborted"


class Aborted(HttpError):
    """The request was aborted while it waited for a worker."""

    def __init__(self, call: WorkerCall, message: str) -> None:
        super().__init__(409, message, code="aborted")
        self.call = call

    async def answer(self, version: str | None, max_lists: int) -> tuple[bytes, str]:
        """Return the body and the content type of its answer. version: of the weights that the fleet serves. Raises
        HttpError 400 for a request that is no JSON object, and itself where the answer would be too long."""
        values = await parse_object_off_loop(self.call.body, max_lists)
        whole, events = self.forms(values, version)
        if values.get("stream") is not True:
            return json.dumps(whole).encode(), "application/json"
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return "".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream; charset=utf-8"

    def forms(self, values: Mapping[str, object], version: str | None) -> tuple[object, list[dict[str, object]]]:
        """Make the answer, and the events where it is streamed: one of each sequence, and that of the usage where it is
        asked for. Raises itself where they would be too long."""
        if num_sequences(values) > _MAX_SEQUENCES:
            raise self
        if self.call.path == "/generate":
            return _of_generate(values, version, self.message)
        return _of_openai(self.call.path, values)


@dataclass(eq=False)
class Names:
    """The ids of one request, read when an abort asks for them."""

    call: WorkerCall
    _left: set[str] | None = field(default=None)  # those that are not aborted

    async def are_aborted(self, abort: Abort, max_lists: int) -> bool:
        """Return whether this abort and the earlier ones are of the whole request."""
        if abort.rids is None:
            return True
        if self._left is None:
            self._left = await _names_of(self.call, max_lists)
        if not self._left & abort.rids:
            return False
        self._left -= abort.rids
        return not self._left


async def _names_of(call: WorkerCall, max_lists: int) -> set[str]:
    if not any(name in call.body for name in _NAMES):
        return set()
    try:
        values = await parse_object_off_loop(call.body, max_lists)
    except HttpError:
        return set()  # a worker says what is wrong with it
    given, prefix = values.get("rid"), _PREFIXES.get(call.path)
    if prefix is not None and (call.path == "/inference/v1/generate" or given is None):
        given = _prefixed(prefix, values)
    return {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}


def _prefixed(prefix: str, values: Mapping[str, object]) -> str | None:
    name = values.get("request_id")
    if not isinstance(name, str):
        return None
    is_whole = prefix == _PREFIXES["/inference/v1/generate"] and name.startswith(prefix)
    return name if is_whole else prefix + name


def inference_name(request_id: str) -> str:
    """Return the id of a request of vLLM's token wire, as workers know it, by the id that its client gave it."""
    return str(_prefixed(_PREFIXES["/inference/v1/generate"], {"request_id": request_id}))


def _of_generate(
    values: Mapping[str, object], version: str | None, message: str
) -> tuple[object, list[dict[str, object]]]:
    """Make the answer, and the events where it is streamed."""
    given, num = values.get("rid"), num_sequences(values)
    names = given if isinstance(given, list) and given else [given or uuid.uuid4().hex]
    each = max(num // len(names), 1)
    ids = names if each == 1 else [f"{name}-{index}" for name in names for index in range(each)]
    lists = ("output_token_logprobs", "input_token_logprobs") if values.get("return_logprob") else ()
    reason = {"type": "abort", "message": message, "status_code": None, "err_type": None}
    answers: list[dict[str, object]] = [
        {
            "text": "",
            "output_ids": [],
            "meta_info": {
                "id": id, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "finish_reason": reason,
                "weight_version": version, "weight_versions": [], **{name: [] for name in lists},
            },
        }
        for id in ids
    ]  # fmt: skip
    prompts = values.get("input_ids") if values.get("text") is None else values["text"]
    is_list = len(ids) > 1 or (isinstance(prompts, list) and isinstance(next(iter(prompts), None), list | str))
    if not is_list:
        return answers[0], answers
    return answers, [{**answer, "index": index} for index, answer in enumerate(answers)]


def _of_openai(path: str, values: Mapping[str, object]) -> tuple[object, list[dict[str, object]]]:
    """Make the answer, and the events where it is streamed."""
    prefix, given = _PREFIXES[path], values.get("rid")
    is_chat, is_tokens = path == "/v1/chat/completions", path == "/inference/v1/generate"
    id = _prefixed(prefix, values) or prefix + uuid.uuid4().hex
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head: dict[str, object] = {"model": values.get("model") or "", "created": int(time.time())}
    if is_tokens:
        head |= {"request_id": id}
        parts: tuple[dict[str, object], dict[str, object]] = ({"token_ids": []}, {"token_ids": []})
    else:
        head |= {
            "id": given if isinstance(given, str) else id,
            "object": "chat.completion" if is_chat else "text_completion",
        }
        message = {"role": "assistant", "content": ""}
        parts = ({"message": message}, {"delta": message}) if is_chat else ({"text": ""}, {"text": ""})
    stop = "stop_reason" if is_tokens else "matched_stop"
    whole, streamed = (
        [
            {"index": index, **part, "logprobs": None, "finish_reason": "abort", stop: None}
            for index in range(num_sequences(values))
        ]
        for part in parts
    )
    chunk = head | ({"object": "chat.completion.chunk"} if is_chat else {})
    options = values.get("stream_options")
    has_usage = isinstance(options, dict) and options.get("include_usage")
    last = [{**chunk, "choices": [], "usage": usage}] if has_usage else []
    return {**head, "choices": whole, "usage": usage}, [*({**chunk, "choices": [one]} for one in streamed), *last]
