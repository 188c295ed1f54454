"""The items of an answer, which grow with the pieces of the chat's message, and the events of their growth.

A piece of another kind ends the open item, so that the items have the order in which the model wrote them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from .tools import ToolNames, custom_input

Event = dict[str, Any]
_CALL_ID = "call_"
_PLAIN_ID_CHARS = 9  # of an id without this beginning
_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc)_(.+)_[0-9]+")  # of an item, with the id of its answer


def answer_of(item_id: object) -> str | None:
    """Return what tells the answer of an item from those of others; None: the id is none that an answer here has."""
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if found is None else found[1]


class Output:
    """The items of one answer."""

    def __init__(self, id: str, names: ToolNames, *, keeps_call_ids: bool) -> None:
        """Begin without items. id: of the answer. keeps_call_ids: those of the chat's message, which a session has
        kept; else they follow from the answer's id, so that another server that goes on with it gives the same."""
        self._id, self._names, self._keeps_call_ids = id, names, keeps_call_ids
        self.items: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []  # of the tokens so far, for texts
        self._num_sent = 0  # of these
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []  # of the open item
        self._num_calls = 0
        self._thoughts: list[str] = []

    @property
    def thoughts(self) -> str:
        """The texts of all reasoning."""
        return "\n".join(self._thoughts)

    def grow(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Add a piece of the message; list the events, which are not numbered yet."""
        if text := delta.get("reasoning_content"):
            yield from self._begin("reasoning")
            self._texts.append(text)
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)
        if text := delta.get("content"):
            yield from self._begin("message")
            self._texts.append(text)
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=self._fresh())
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """End the last item, or make an empty message where there is none; list the events. is_cut: the answer is not
        whole."""
        if not self.items:
            yield from self._begin("message")
        yield from self._close(status="incomplete" if is_cut else "completed")
        first = next((item for item in self.items if item["type"] == "message"), None)
        if first is not None:
            first["content"][0]["logprobs"] = self.logprobs

    # -- items -----------------------------------------------------------------------------------------------------

    def _begin(self, kind: str) -> Iterator[Event]:
        """Open an item of this kind, unless it is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._close()
        item: dict[str, Any]
        if kind == "reasoning":
            item = {"id": self._item_id("rs"), "type": "reasoning", "summary": [], "content": [],
                    "encrypted_content": None, "status": "in_progress"}  # fmt: skip
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._item_id("msg"), "type": "message", "role": "assistant", "content": [],
                    "status": "in_progress"}  # fmt: skip
            part = _text_part("", [])
        yield from self._add(item)
        yield self._event("response.content_part.added", content_index=0, part=part)

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._open, self._texts = item, []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        item, text = self._open, "".join(self._texts)
        item["status"] = status
        if item["type"] == "reasoning":
            self._thoughts.append(text)
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            yield self._event("response.reasoning_text.done", content_index=0, text=text)
        else:
            its = self.logprobs[: self._num_sent] if self._is_first_message else []
            part = _text_part(text, its)
            yield self._event("response.output_text.done", content_index=0, text=text, logprobs=its)
        yield self._event("response.content_part.done", content_index=0, part=part)
        item["content"] = [part]
        yield self._done()

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        """Add a call, which comes in two pieces: its name, and its arguments."""
        function = call["function"]
        if "id" in call:
            yield from self._close()
            its = self._names.of(function["name"])
            kind, text = ("custom_tool_call", "input") if its.kind == "custom" else ("function_call", "arguments")
            item = {
                "id": self._item_id("ctc" if its.kind == "custom" else "fc"), "type": kind,
                "call_id": self._call_id(call["id"]), "name": its.name, text: "",
                **({} if its.namespace is None else {"namespace": its.namespace}),
                **({} if its.kind == "custom" else {"status": "in_progress"}),
            }  # fmt: skip
            yield from self._add(item)
            return
        assert self._open is not None, "the piece with the name has come"
        item, arguments = self._open, function["arguments"]
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(arguments)
            yield self._event("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        else:
            item |= {"arguments": arguments, "status": "completed"}
            yield self._event("response.function_call_arguments.delta", delta=arguments)
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=arguments)
        yield self._done()

    def _done(self) -> Event:
        """End the open item."""
        item, self._open = self._open, None
        return {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item or {})}

    @property
    def _is_first_message(self) -> bool:
        return sum(item["type"] == "message" for item in self.items) == 1

    # -- parts of events -------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        """Make an event of the open item."""
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items) - 1, **fields}

    def _fresh(self) -> list[dict[str, Any]]:
        """Return the log-probabilities that no event has yet."""
        found = self.logprobs[self._num_sent :]
        self._num_sent = len(self.logprobs)
        return found

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id.removeprefix('resp_')}_{len(self.items)}"

    def _call_id(self, given: str) -> str:
        self._num_calls += 1
        if self._keeps_call_ids:
            return given
        own = hashlib.blake2b(f"{self._id} {self._num_calls}".encode(), digest_size=12).hexdigest()
        return _CALL_ID + own if given.startswith(_CALL_ID) else own[:_PLAIN_ID_CHARS]


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
