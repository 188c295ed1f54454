"""The parts of an answer: content, reasoning and tool calls, found while the text grows.

transformers' `ResponseParser` finds the places where parts begin and end. No text is lost: a call that cannot be read
stays in the content as it was written, markers included. Blanks beside reasoning or a call belong to neither.

    text:   <think> a b </think> \\n\\n hello \\n <tool_call>{...}</tool_call> \\n <tool_call>{"na
    parts:          reasoning         content     call                       content, at the end: a call never closed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate

from .call_end import CallEnd, Values
from .calls import Call, Item, Schemas, may_be_json_of, read_object
from .formats import CALL, CONTENT, REASONING, Read

_SLICE_CHARS = 1 << 11  # of a text that are fed at a time
_MAX_GIVEN_UP = 16  # calls that could not be read with an end marker in a value, before each marker ends its call
_MAX_KEPT_CHARS = 1 << 14  # of text behind it that a parser of transformers keeps, before a new one follows it


@dataclass(frozen=True)
class Part:
    """A piece of an answer: of its content or reasoning, or a whole call."""

    kind: str
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class AnswerForm:
    """The form of a request's answers."""

    template: ResponseTemplate
    read: Read | None  # of a call's body; None: see `ToolFormat.read`
    schemas: Schemas  # of the tools
    max_calls: int | None = None  # further calls stay content; None: any number
    separates: bool = True  # False: reasoning stays content, with its markers
    streams_reasoning: bool = True  # False: it comes as one piece, when it ends
    num_id_chars: int = 24
    opens: str = ""  # the marker of reasoning that a prompt may end with
    closes: str = ""
    begins_inside: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)  # kinds of fields that have other names
    can_restart: bool = True  # no pattern depends on the text before its match
    values: Values | None = None  # of calls; see `ToolFormat.values`

    def prefix(self, prompt: str, begun: str | None = None) -> str:
        """Return the marker if an answer begins with reasoning that is open already, else an empty text. prompt: its
        end. begun: the beginning of the answer, where the prompt has it."""
        if not self.opens:
            return ""
        if begun is not None and (self.opens in begun or self.closes in begun):
            is_open = begun.rfind(self.opens) > begun.rfind(self.closes)
        elif begun and self.separates:
            is_open = False  # content, whose thoughts the client has apart from it
        else:
            end = prompt.rstrip()
            is_open = end.endswith(self.opens) or (self.begins_inside and not end.endswith(self.closes))
        return self.opens if is_open else ""


@dataclass(frozen=True)
class Beginning:
    """The state in which an answer begins, at the end of its prompt."""

    prefix: str = ""  # the marker that opens reasoning, where it is open
    is_done: bool = False  # reasoning has ended
    begun: str = ""  # the text of an answer that goes on, as it was sampled behind the prefix

    def is_open(self, form: AnswerForm) -> bool:
        """Return whether reasoning is open."""
        text = self.prefix + self.begun
        return bool(form.opens) and text.rfind(form.opens) > text.rfind(form.closes)


class _Blanks:
    """A text that grows, without the blanks around it."""

    def __init__(self) -> None:
        self.drops_first = False
        self._held: list[str] = []  # blanks at the end so far

    def take(self, text: str) -> str:
        """Add text; return the part that is known not to end in blanks."""
        if self.drops_first:
            text = text.lstrip()
        if not text:
            return ""
        self.drops_first = False
        kept = text.rstrip()
        if not kept:
            self._held.append(text)
            return ""
        found = "".join((*self._held, kept))
        self._held = [text[len(kept) :]]
        return found

    def end(self) -> str:
        """Return the blanks at the end."""
        held, self._held = "".join(self._held), []
        return held


class AnswerParser:
    """Divide one answer into parts. The parts do not depend on the cuts between the texts that are fed."""

    def __init__(self, form: AnswerForm, prefix: str = "", begun: str = "") -> None:
        """Begin an answer. prefix, begun: see `Beginning`."""
        self._form = form
        self._content, self._reasoning = _Blanks(), _Blanks()
        self._field: str | None = None  # that is open; None: content outside of all
        self._opened = ""  # its marker
        self._captures: dict[str, str] = {}
        self._body: list[str] = []  # of a field that is read when it ends
        self._end: CallEnd | None = None  # of the call that is open
        self._first_end = 0  # characters of its text up to the first end marker, which a value holds; 0: none has come
        self._num_given_up = 0  # calls that have ended with such a marker all the same
        self._waiting: deque[str] = deque()  # text that is fed next
        self._unseen = ""  # text that no event has named yet
        self._num_kept = 0  # characters that the parser of transformers keeps
        self._is_reopening = False  # the next event names a field that is open already
        self._parts: list[Part] = []
        self._has_content = False
        self.num_calls = 0
        self.num_held = 0  # characters of a call that is open
        self._parser = self._restarted(prefix)
        self._unseen = prefix
        self._follow(self._parser.initial_events)
        if prefix:
            self._opened = ""  # the prompt has it, and not the answer
            self._parts.clear()
        if begun:
            self.feed(begun)
            self._content.end()  # which the answer had when it was cut
            self._has_content = False

    def feed(self, text: str) -> list[Part]:
        """Add text and return the parts that are certain now."""
        # Behind each marker the parser of transformers looks for every other one, up to the end of what it has.
        self._waiting.extend(_slices(text))
        self._feed_waiting()
        return self._taken()

    def _feed_waiting(self) -> None:
        while self._waiting:
            text = self._waiting.popleft()
            if self._first_end:
                self._feed_value(text)
            else:
                self._feed(text)

    def _feed(self, text: str) -> None:
        self._unseen += text
        self._num_kept += len(text)
        self._follow(self._parser.feed(text))
        if self._num_kept > _MAX_KEPT_CHARS and not self._unseen and self._form.can_restart:
            self._parser = self._restarted("" if self._field is None else self._opened or self._form.opens)
            # A marker that is a pattern is only certain when text follows it: its event comes again then.
            self._is_reopening = self._field is not None and not self._parser.initial_events

    def finish(self) -> list[Part]:
        """End the answer and return its last parts."""
        while self._first_end:
            self._end_at_first()
            self._feed_waiting()
        _, events = self._parser.finalize()
        self._follow(events)
        blanks = self._content.end()
        if self._has_content or not self._content.drops_first:
            self._emit(CONTENT, blanks)
        return self._taken()

    def _restarted(self, opened: str) -> ResponseParser:
        """Return a parser behind this marker, which is open; it has no other text."""
        self._num_kept = len(opened)
        return ResponseParser(self._form.template, prefix=opened)

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._has_content = self._has_content or kind == CONTENT
            self._parts.append(Part(kind, text))

    # -- events ----------------------------------------------------------------------------------------------------

    def _follow(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            name = event["field"]
            if name == self._form.template.implicit:
                if event["type"] == "region_chunk":
                    self._unseen = self._unseen[len(event["text"]) :]
                    self._add_content(event["text"])
            elif event["type"] == "region_open":
                if not self._is_reopening:
                    self._open(name)
                self._is_reopening = False
            elif event["type"] == "region_chunk":
                self._unseen = self._unseen[len(event["text"]) :]
                self._add(event["text"])
            elif self._is_end_in_value(name):
                return  # the other events are of a text that the value holds
            else:
                self._close(name)

    def _open(self, name: str) -> None:
        match = self._form.template.fields[name].open_re.search(self._unseen)
        assert match is not None  # the parser has found it
        self._add_content(self._unseen[: match.start()])  # a template may have no field for it
        self._unseen = self._unseen[match.end() :]
        self._field, self._opened, self._body = name, match.group(), []
        self._captures = {key: value for key, value in match.groupdict().items() if value is not None}
        if self._kind == CALL:
            may_be_json = partial(may_be_json_of, schemas=self._form.schemas)
            self._end = None if self._form.values is None else CallEnd(self._form.values, may_be_json)
        if self._kind == REASONING:
            self._reasoning.drops_first = True
            if not self._form.separates:
                self._add_content(self._opened)

    @property
    def _kind(self) -> str:
        assert self._field is not None
        return self._form.roles.get(self._field, self._field)

    def _add(self, text: str) -> None:
        if self._kind == CALL:
            self._body.append(text)
            self.num_held += len(text)
            if self._end is not None:
                self._end.feed(text)
        elif self._kind != REASONING or not self._form.separates:
            self._add_content(text)
        elif self._form.streams_reasoning:
            self._emit(REASONING, self._reasoning.take(text))
        else:
            self._body.append(self._reasoning.take(text))

    def _close(self, name: str) -> None:
        closed = self._marker(name)
        self._unseen = self._unseen[len(closed) :]
        body = "".join(self._body)
        if self._kind == CALL:
            self._end_call(body, self._opened + body + closed)
        elif self._kind == REASONING and not self._form.separates:
            self._add_content(closed)
        elif self._kind == REASONING:
            self._emit(REASONING, body)
            self._reasoning.end()
            self._drop_blanks()
        self._leave()

    def _leave(self) -> None:
        self._field, self._opened, self._body, self.num_held = None, "", [], 0
        self._end, self._first_end = None, 0

    def _marker(self, name: str) -> str:
        """Return the marker that closes the field here; empty at the end of an answer."""
        close_re = self._form.template.fields[name].close_re
        match = close_re.match(self._unseen) if close_re is not None and self._unseen else None
        return match.group() if match is not None else ""

    # -- calls -----------------------------------------------------------------------------------------------------

    def _is_end_in_value(self, name: str) -> bool:
        """Return whether a value of the call spells the marker that closes the field here. Then the text behind it is
        fed again, as the call's."""
        closed = self._marker(name)
        if self._end is None or not closed or self._num_given_up >= _MAX_GIVEN_UP:
            return False
        if self._end.feed(closed) is not None:
            return False
        self._body.append(closed)
        self.num_held += len(closed)
        self._first_end = self.num_held
        self._waiting.appendleft(self._unseen[len(closed) :])
        self._unseen, self._parser = "", self._restarted("")
        return True

    def _feed_value(self, text: str) -> None:
        """Add text to a call, one of whose values has spelled its end marker."""
        assert self._end is not None
        num_behind = self._end.feed(text)
        own = text if num_behind is None else text[: len(text) - num_behind]
        self._body.append(own)
        self.num_held += len(own)
        if num_behind is None:
            return
        self._waiting.appendleft(text[len(own) :])
        body = "".join(self._body)
        closed = next(end for end in self._end.values.ends if body.endswith(end))
        items = self._read(body.removesuffix(closed), self._opened + body)
        if items is None:
            self._end_at_first()
        else:
            self._add_items(items)
            self._leave()

    def _end_at_first(self) -> None:
        """End the call, as it cannot be read otherwise, with the first end marker; the text behind it is fed again."""
        assert self._end is not None
        body = "".join(self._body)
        own, behind = body[: self._first_end], body[self._first_end :]
        closed = next(end for end in self._end.values.ends if own.endswith(end))
        self._num_given_up += 1
        self._end_call(own.removesuffix(closed), self._opened + own)
        self._leave()
        self._waiting.extendleft(reversed(_slices(behind)))

    def _end_call(self, body: str, raw: str) -> None:
        self._add_items(self._read(body, raw) or [raw])

    def _read(self, body: str, raw: str) -> list[Item] | None:
        """Return the items of a call's text; None where it has no call."""
        form = self._form
        try:
            if form.read is None:
                items = read_object(self._captures["name"], body, raw)
            else:
                items = form.read(body, raw, form.schemas)
        except ValueError:
            return None
        return items if any(isinstance(item, Call) for item in items) else None

    def _add_items(self, items: list[Item]) -> None:
        form = self._form
        for item in items:
            if isinstance(item, str):
                self._add_content(item)
            elif form.max_calls is not None and self.num_calls >= form.max_calls:
                self._add_content(item.raw)
            else:
                self._drop_blanks()
                self.num_calls += 1
                self._parts.append(Part(CALL, call=item))

    def _add_content(self, text: str) -> None:
        self._emit(CONTENT, self._content.take(text))

    def _drop_blanks(self) -> None:
        """Forget the blanks around a part that is no content."""
        self._content.end()
        self._content.drops_first = True


def _slices(text: str) -> list[str]:
    return [text[start : start + _SLICE_CHARS] for start in range(0, len(text), _SLICE_CHARS)]
