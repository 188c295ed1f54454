"""The response object of an answer, and the events of its stream: both are made of the chunks of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..edge.errors import HttpError
from ..edge.json_slices import encode_in_slices
from ..generation.sse import dumps
from .output import Event, Output
from .request import ResponsesRequest

_HEAD = frozenset({"id", "object", "created", "model", "choices", "usage", "metadata"})  # of chunks
_CHOICE = frozenset({"index", "delta", "logprobs", "finish_reason"})
_GROWING = ("token_ids", "response_token_ids")
_LAST = {"completed": "response.completed", "incomplete": "response.incomplete"}  # events, by status
_MAX_LENGTH = "max_output_tokens"


class ResponseWriter:
    """The response object that grows with chunks, and its events. See `Writer` of OpenAI's API."""

    def __init__(self, request: ResponsesRequest, count: Callable[[str], int], *, is_turn: bool) -> None:
        """Begin. count: counts the tokens of a text. is_turn: the answer becomes one of a session."""
        self._request, self._count = request, count
        self._output = Output(request.id, request.tool_names, keeps_call_ids=is_turn)
        self._number = 0  # of the next event
        self._status = "in_progress"
        self._fields: dict[str, Any] = {}  # that a chat has too: token ids, weights, the session
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] | None = None
        self._num_thought = 0  # tokens
        self._last = ""  # the response of the last event, without the end of its JSON, which is its usage

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """See `Writer.chunk`."""
        return self._encoded(self._begin()) + self._encoded(self.grow(chunk)) + self._end_of(chunk)

    def resume(self, num_events: int) -> None:
        """See `Writer.resume`."""
        self._number = num_events

    def failed(self, error: HttpError) -> bytes:
        """See `Writer.failed`."""
        begun = self._encoded(self._begin())
        error, self._status = self._request.places.renamed(error), "failed"
        code = error.code or str(error.status)
        what = {"code": code, "message": error.message, "param": error.param, "status": error.status}
        failure = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
        events: list[Event] = [
            {"type": "error", **what},
            {"type": "response.failed", "response": self._object(error=failure)},
        ]
        return begun + self._encoded(events)

    def end(self) -> bytes:
        """See `Writer.end`. This API's streams end with the event of the whole response."""
        return b""

    def grow(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Add a chunk; return the events, which are not numbered yet. The last chunk with a choice ends the items."""
        self._fields |= {name: value for name, value in chunk.items() if name not in _HEAD}
        if "metadata" in chunk:  # the request has one of its own
            self._fields["weight_version"] = chunk["metadata"]["weight_version"]
        if chunk.get("usage") is not None:
            self._usage = self._translated(chunk["usage"])
        events: list[Event] = []
        for choice in chunk["choices"]:
            self._take(choice)
            events += self._output.grow(choice["delta"])
            if (reason := choice["finish_reason"]) is not None:
                is_cut = reason not in ("stop", "tool_calls")
                self._status = "incomplete" if is_cut else "completed"
                self._fields["finish_reason"] = reason
                events += self._output.end(is_cut=is_cut)
                self._num_thought = self._count(self._output.thoughts)
        return events

    def whole(self) -> dict[str, Any]:
        """Return the response of all chunks."""
        return self._object() | {"usage": self._usage}

    def _begin(self) -> list[Event]:
        """Return the events before the first chunk's; none later."""
        if self._number:
            return []
        first = self._object() | {"usage": None}
        return [{"type": f"response.{kind}", "response": first} for kind in ("created", "in_progress")]

    def _end_of(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the last event where the chunk brings the usage. It was made with the last choice, in the thread for
        long answers; what is left for the chunk of the usage, which is written on the event loop, is a copy."""
        if any(choice["finish_reason"] is not None for choice in chunk["choices"]):
            self._last = "".join(encode_in_slices({"response": self._object()}, dumps))[1:-2]
        if self._usage is None or not self._last:
            return b""
        kind, number = _LAST[self._status], self._number
        self._number += 1
        head = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number}'
        return f'{head},{self._last},"usage":{dumps(self._usage)}}}}}\n\n'.encode()

    def _encoded(self, events: Iterable[Event]) -> bytes:
        """Number and encode events."""
        found = []
        for event in events:
            numbered = {**event, "sequence_number": self._number}
            self._number += 1
            found.append(f"event: {event['type']}\ndata: {''.join(encode_in_slices(numbered, dumps))}\n\n")
        return "".join(found).encode()

    def _object(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the response so far, without its usage."""
        reason = _MAX_LENGTH if self._fields.get("finish_reason") == "length" else None
        details = {"reason": reason} if self._status == "incomplete" else None
        found = {
            "id": self._request.id,
            "object": "response",
            "created_at": self._request.created,
            "status": self._status,
            "error": error,
            "incomplete_details": details,
            "model": self._request.model,
            **self._request.repeated,
            "output": [dict(item) for item in self._output.items],
            **self._fields,
        }
        if self._request.shows_logprobs:
            found["logprobs"] = {"content": self._logprobs, "refusal": None}
        return found

    def _take(self, choice: Mapping[str, Any]) -> None:
        """Take the fields of a choice that are no part of its message."""
        for name, value in choice.items():
            if name in _GROWING:
                self._fields.setdefault(name, []).extend(value)
            elif name not in _CHOICE:
                self._fields[name] = value
        if choice["logprobs"] is None:
            return
        entries = choice["logprobs"]["content"]
        if self._request.shows_logprobs:
            self._logprobs += entries
        if self._request.wants_logprobs:
            self._output.logprobs += map(_plain, entries)

    def _translated(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the usage in this API's form."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": min(self._num_thought, usage["completion_tokens"]),
                **(usage.get("completion_tokens_details") or {}),
            },
            "total_tokens": usage["total_tokens"],
        }


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of a token as this API has them, where bytes are always a list."""
    top = [{**other, "bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
    return {**entry, "bytes": entry["bytes"] or [], "top_logprobs": top}
