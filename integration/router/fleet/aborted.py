"""Aborts of requests that wait for a worker: which ones are meant, and their answers, which no worker makes.

An answer is that of a request which was aborted before its first token. No worker has read its prompt, so it counts no
prompt tokens.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from ...http.edge.bodies import parse_object_off_loop
from ...http.edge.errors import HttpError
from ..calls import WorkerCall
from .balance import num_sequences

_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/messages": "msg_",
    "/v1/responses": "resp_",
    "/inference/v1/generate": "generate-tokens-",
}
NAMED = frozenset({"/v1/messages", "/v1/responses"})  # of requests whose streams have events with names
PATHS = frozenset({"/generate", *_PREFIXES})  # of requests that can be aborted
_MAX_SEQUENCES = 1 << 16  # of an answer
_NAMES = (b'"rid"', b'"request_id"')


@dataclass(frozen=True)
class Abort:
    """An abort of requests by the ids that their clients gave them."""

    rids: frozenset[str] | None  # None: of all
    message: str = "Aborted"


class AbortLog:
    """The aborts since the oldest open request began. A request that one of them means does not begin again elsewhere:
    its worker has died, perhaps before it heard of the abort."""

    def __init__(self) -> None:
        self._aborts: deque[Abort] = deque()
        self._num_dropped = 0  # aborts before these
        self._open: dict[Since, None] = {}  # of the open requests, in the order in which they began

    def __len__(self) -> int:
        return len(self._aborts)

    def add(self, abort: Abort) -> None:
        """Note an abort for the requests that are open."""
        if self._open:
            self._aborts.append(abort)

    @contextmanager
    def since_now(self) -> Iterator[Since]:
        """Yield the aborts from now on, for a request that is open inside the block."""
        since = Since(self, self._num_dropped + len(self._aborts))
        self._open[since] = None
        try:
            yield since
        finally:
            del self._open[since]
            oldest = next(iter(self._open), None)
            while self._aborts and (oldest is None or self._num_dropped < oldest.start):
                self._aborts.popleft()
                self._num_dropped += 1

    def get(self, number: int) -> Abort | None:
        """Return the abort with this number, counted from the first of all; None: there is none yet."""
        at = number - self._num_dropped
        return self._aborts[at] if at < len(self._aborts) else None


@dataclass(frozen=True, eq=False)
class Since:
    """The aborts since one request began, also those that come while they are listed."""

    log: AbortLog
    start: int  # number of the first one

    def __iter__(self) -> Iterator[Abort]:
        for number in count(self.start):
            if (abort := self.log.get(number)) is None:
                return
            yield abort


class Aborted(HttpError):
    """The request was aborted while no worker had it."""

    def __init__(self, call: WorkerCall, message: str) -> None:
        # The clients of OpenAI and Anthropic call again after a 409, unless this header says that it has no use.
        super().__init__(409, message, code="aborted", headers={"X-Should-Retry": "false"})
        self.call = call

    async def answer(self, version: str | None, max_lists: int) -> tuple[bytes, str]:
        """Return the body and the content type of its answer. version: of the weights that the fleet serves. Raises
        HttpError 400 for a request that is no JSON object, and itself where the answer would be too long."""
        values = await parse_object_off_loop(self.call.body, max_lists)
        whole, events = self.forms(values, version)
        if values.get("stream") is not True:
            return json.dumps(whole).encode(), "application/json"
        if self.call.path in NAMED:
            lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]
        else:
            lines = [*(f"data: {json.dumps(event)}\n\n" for event in events), "data: [DONE]\n\n"]
        return "".join(lines).encode(), "text/event-stream; charset=utf-8"

    def forms(self, values: Mapping[str, object], version: str | None) -> tuple[object, list[dict[str, object]]]:
        """Make the answer, and the events where it is streamed: one of each sequence, and that of the usage where it is
        asked for. Raises itself where they would be too long."""
        if num_sequences(values) > _MAX_SEQUENCES:
            raise self
        if self.call.path == "/generate":
            return _of_generate(values, version, self.message)
        if self.call.path == "/v1/messages":
            return _of_message(values, self.message)
        if self.call.path == "/v1/responses":
            return _of_response(values, self.message)
        return _of_openai(self.call.path, values, self.message)


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


def _of_openai(
    path: str, values: Mapping[str, object], message: str
) -> tuple[object, list[dict[str, object]]]:  # fmt: skip
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
        empty = {"role": "assistant", "content": ""}
        parts = ({"message": empty}, {"delta": empty}) if is_chat else ({"text": ""}, {"text": ""})
    stop = "stop_reason" if is_tokens else "matched_stop"
    whole, streamed = (
        [
            {"index": index, **part, "logprobs": None, "finish_reason": "abort", stop: None, "finish_message": message}
            for index in range(num_sequences(values))
        ]
        for part in parts
    )
    chunk = head | ({"object": "chat.completion.chunk"} if is_chat else {})
    options = values.get("stream_options")
    has_usage = isinstance(options, dict) and options.get("include_usage")
    last = [{**chunk, "choices": [], "usage": usage}] if has_usage else []
    return {**head, "choices": whole, "usage": usage}, [*({**chunk, "choices": [one]} for one in streamed), *last]


def _id_of(path: str, values: Mapping[str, object]) -> str:
    given = values.get("rid")
    prefix = _PREFIXES[path]
    return given if isinstance(given, str) else _prefixed(prefix, values) or prefix + uuid.uuid4().hex


def _of_message(values: Mapping[str, object], why: str) -> tuple[object, list[dict[str, object]]]:
    """Make the message, and the events where it is streamed. Its turn is paused, as where a worker aborts it."""
    usage = {
        "input_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 0,
    }  # fmt: skip
    id, model = _id_of("/v1/messages", values), values.get("model") or ""
    message = {"id": id, "type": "message", "role": "assistant", "model": model, "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    end = {"stop_reason": "pause_turn", "stop_sequence": None}
    cause = {"finish_message": why}
    return message | end | cause, [
        {"type": "message_start", "message": message},
        {"type": "message_delta", "delta": end, "usage": usage, **cause},
        {"type": "message_stop"},
    ]


def _of_response(values: Mapping[str, object], why: str) -> tuple[object, list[dict[str, object]]]:
    """Make the response, and the events where it is streamed. It is incomplete for no reason that this API names."""
    begun: dict[str, object] = {
        "id": _id_of("/v1/responses", values), "object": "response", "created_at": int(time.time()),
        "status": "in_progress", "error": None, "incomplete_details": None, "model": values.get("model") or "",
        "instructions": values.get("instructions"), "metadata": values.get("metadata") or {}, "output": [],
        "parallel_tool_calls": values.get("parallel_tool_calls") is not False,
        "temperature": values.get("temperature"), "tool_choice": values.get("tool_choice") or "auto",
        "tools": values.get("tools") or [], "top_p": values.get("top_p"), "usage": None,
    }  # fmt: skip
    usage = {
        "input_tokens": 0, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 0,
    }  # fmt: skip
    end = {"status": "incomplete", "incomplete_details": {"reason": None}, "finish_reason": "abort",
           "finish_message": why, "usage": usage}  # fmt: skip
    kinds = {"created": begun, "in_progress": begun, "incomplete": begun | end}
    return begun | end, [
        {"type": f"response.{kind}", "sequence_number": number, "response": response}
        for number, (kind, response) in enumerate(kinds.items())
    ]
