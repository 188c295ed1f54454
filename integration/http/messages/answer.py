"""Messages made of the answers of chats: whole, and as the events of a stream."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..edge.errors import HttpError, message_error_body
from ..edge.json_slices import encode_in_slices
from ..generation.sse import dumps

Fields = dict[str, Any]

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
_CUT, _CONTEXT_IS_FULL = "max_tokens", "model_context_window_exceeded"
_OWN = ("id", "object", "created", "model", "choices", "usage")  # of an answer; what else it has is kept as it is
_OWN_OF_CHOICE = ("index", "message", "delta", "finish_reason", "matched_stop")
_LISTS = ("token_ids", "response_token_ids")  # of chunks, which together are those of the answer
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of which there may be the other one
_TEXTS = {  # of a chat's message: the block, its field, and the delta that each becomes
    "reasoning_content": ("thinking", "thinking", "thinking_delta"),
    "content": ("text", "text", "text_delta"),
}


def stop_of(choice: Mapping[str, Any], usage: Mapping[str, Any], max_model_len: int) -> Fields:
    """Make the fields that say how an answer ended. One that a caller aborted has paused its turn: sent back, it goes
    on. One that the engine ended by itself is cut, as the same request would be again."""
    kind, matched = choice.get("finish_reason"), choice.get("matched_stop")
    reason = _REASONS.get(kind, kind) if kind is not None else None
    is_full = usage["prompt_tokens"] + usage["completion_tokens"] >= max_model_len or "finish_message" in choice
    if kind == "length" and is_full:  # the message is of a full KV pool
        reason = _CONTEXT_IS_FULL
    if kind == "abort" and choice.get("aborted_by") == "engine":
        reason = _CUT
    is_text = kind == "stop" and isinstance(matched, str)
    return {"stop_reason": "stop_sequence" if is_text else reason, "stop_sequence": matched if is_text else None}


def usage_of(usage: Mapping[str, Any]) -> dict[str, int]:
    """Make the counts of tokens: those of the prompt that the cache had are counted for themselves."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }


def extras_of(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> Fields:
    """Return what Lockstep's chats say beyond OpenAI's: the weights, the session, tokens and log-probabilities."""
    found = {name: value for name, value in choice.items() if name not in _OWN_OF_CHOICE and value is not None}
    return found | {name: value for name, value in answer.items() if name not in _OWN}


def message_of(chat: Mapping[str, Any], deltas: Sequence[Fields], max_model_len: int) -> Fields:
    """Make the message of a chat's whole answer. deltas: its pieces, whose order the blocks have."""
    [choice] = chat["choices"]
    return {
        "id": chat["id"],
        "type": "message",
        "role": "assistant",
        "model": chat["model"],
        "content": _blocks(deltas),
        **stop_of(choice, chat["usage"], max_model_len),
        "usage": usage_of(chat["usage"]),
        **extras_of(chat, choice),
    }


def _blocks(deltas: Sequence[Fields]) -> list[Fields]:
    found: list[Fields] = []
    for delta in deltas:
        for name, (kind, field, _) in _TEXTS.items():
            if not (text := delta.get(name)):
                continue
            if not found or found[-1]["type"] != kind:
                found.append({"type": kind, field: ""})
            found[-1][field] += text
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                found.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}})
            else:
                found[-1]["input"] = _input(call["function"]["arguments"])
    for block in found:
        if block["type"] == "thinking":
            block["signature"] = signature(block["thinking"])
    return found


def _input(arguments: str) -> Any:
    """Return the arguments of a call. Half of a surrogate pair, which no client could send back, is U+FFFD."""
    if _HALF.search(arguments):
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        arguments = arguments.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(arguments)


def signature(thinking: str) -> str:
    """Return a signature of thoughts. It is not checked here: clients drop thoughts that have none."""
    return hashlib.sha256(thinking.encode(errors="surrogatepass")).hexdigest()[:32]


class EventWriter:
    """The events of a message, made of the chunks of a chat. See `Writer`."""

    def __init__(self, max_model_len: int) -> None:
        """Begin a stream. max_model_len: tokens of the context."""
        self._max_model_len = max_model_len
        self._has_begun = False
        self._index = -1  # of the block that is open, or was last
        self._kind: str | None = None  # of the block that is open
        self._thoughts: list[str] = []  # of the block that is open
        self._last: Mapping[str, Any] = {}  # the choice that said how the answer ended
        self._extras: Fields = {}
        self._told = ""  # their JSON without braces, made with the last output: it may be long
        self._logprobs: list[Any] = []

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """See `Writer.chunk`."""
        events: list[Fields] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(self._start(chunk))
        if not chunk["choices"]:
            last, stop = self._end(chunk)
            told = f"{dumps(last)[:-1]},{self._told}}}" if self._told else dumps(last)
            return _encode(events) + _event("message_delta", told) + _encode([stop])
        [choice] = chunk["choices"]
        self._keep(chunk, choice)
        delta = choice["delta"]
        for name, (kind, field, what) in _TEXTS.items():
            if text := delta.get(name):
                if self._kind != kind:
                    events += [*self._close(), self._open({"type": kind, field: ""})]
                events.append(self._delta({"type": what, field: text}))
                if kind == "thinking":
                    self._thoughts.append(text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                events += [*self._close(), self._open(block)]
            if function.get("arguments"):
                given = dumps(_input(function["arguments"])) if _HALF.search(function["arguments"]) else None
                partial = given or function["arguments"]
                events.append(self._delta({"type": "input_json_delta", "partial_json": partial}))
        if choice["finish_reason"] is not None:
            self._last = choice
            events += self._close()
            if self._logprobs:
                self._extras["logprobs"] = {"content": self._logprobs, "refusal": None}
            self._told = "".join(encode_in_slices(self._extras, dumps))[1:-1]
        return _encode(events)

    def resume(self, num_events: int) -> None:
        """See `Writer.resume`. These events have no numbers."""

    def failed(self, error: HttpError) -> bytes:
        """See `Writer.failed`."""
        return _encode([message_error_body(error)])

    def end(self) -> bytes:
        """See `Writer.end`."""
        return b""

    def _start(self, chunk: Mapping[str, Any]) -> Fields:
        message = {"id": chunk["id"], "type": "message", "role": "assistant", "model": chunk["model"], "content": [],
                   "stop_reason": None, "stop_sequence": None, "usage": usage_of(chunk["usage"])}  # fmt: skip
        return {"type": "message_start", "message": message}

    def _end(self, chunk: Mapping[str, Any]) -> list[Fields]:
        usage = chunk["usage"]
        delta = stop_of(self._last, usage, self._max_model_len)
        last = {"type": "message_delta", "delta": delta, "usage": usage_of(usage)}
        return [last, {"type": "message_stop"}]

    def _keep(self, chunk: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        """Keep what Lockstep says of the answer, for its last event."""
        for name, value in extras_of(chunk, choice).items():
            if name == "logprobs":
                self._logprobs += value["content"]
            elif name in _LISTS:
                self._extras.setdefault(name, []).extend(value)
            else:
                self._extras[name] = value

    def _open(self, block: Fields) -> Fields:
        self._index, self._kind = self._index + 1, block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Fields]:
        if self._kind is None:
            return []
        events: list[Fields] = []
        if self._kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": signature("".join(self._thoughts))}))
            self._thoughts.clear()
        self._kind = None
        return [*events, {"type": "content_block_stop", "index": self._index}]


def _encode(events: Sequence[Fields]) -> bytes:
    """Encode events, each under the name of its type."""
    return b"".join(_event(one["type"], dumps(one)) for one in events)


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()
