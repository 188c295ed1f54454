"""The tokens of a stream that a client has, read from the comments that a worker writes before each event.

A comment is one line, `: progress {JSON}`. The first one of a stream has the answer's head, its number of sequences and
the worker's guarantee; each other one what an event adds to one sequence. Where several events are of one output, a
comment before the first says how many: the client gets all of them or none.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...http.edge.errors import SERVER_ENDED
from ..wire import WorkerFailed

_END_OF_EVENT = re.compile(rb"\n\r?\n")  # the end of its last line, and an empty line
_T = TypeVar("_T")
_MARK = b": progress "
_GROUP = re.compile(rb'^: progress \{"events": ?([0-9]{1,6})\}$', re.MULTILINE)
_DONE = [b"data: [DONE]"]
# The name of the last event, of APIs that have no such word.
_LAST = (b"event: message_stop", b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_ERRORS = (b'data: {"error"', b'data: {"type":"error"')
_SERVERS = ("server_error", "api_error", "overloaded_error")  # types of errors that are the worker's own
_FAILED = 500  # codes of errors from here on are the worker's own
_MAX_SEQUENCES = 4096  # of one stream that can move


def end_of_events(data: bytes | bytearray, start: int = 0) -> int:
    """Return where the last whole event in some bytes of a stream ends; 0 where none ends in them. start: no event ends
    before it."""
    ends = [at + len(end) for end in (b"\n\n", b"\n\r\n") if (at := data.rfind(end, start)) >= 0]
    return max(ends, default=0)


class Host(Protocol):
    """A server as it reports itself in GET /server_info."""

    @property
    def weight_digest(self) -> str | None:
        """The digest of its weights; None: it has none yet, or reports none."""

    @property
    def guarantee(self) -> dict[str, object] | None:
        """The plain values on which its bits depend; None: not reported."""


class StreamCut(WorkerFailed):
    """The worker ended the stream before the answer's end, and said so."""


@dataclass(eq=False)
class Part:
    """The part of one sequence that the client has."""

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    num_chars: int = 0
    cached: int = 0
    has_ended: bool = False
    num_prompt: int = 0  # tokens of its prompt
    newest: bytes = b""  # event of it; empty where there was no memory for it
    spans: list[tuple[str, str | None, int]] = field(default_factory=list)  # version, digest, first token
    told: tuple[str, str | None] | None = None  # version and digest of the newest tokens; a worker tells only changes

    def add(self, note: Mapping[str, Any]) -> None:
        if num := note.get("taken_back", 0):
            del self.token_ids[-num:], self.logprobs[-num:]
            while self.spans and self.spans[-1][2] >= len(self.token_ids):
                self.spans.pop()
        self.num_chars -= note.get("chars_taken_back", 0)
        if "digest" in note:
            version, digest = _valid(note["version"], str), note["digest"]
            if digest is not None:
                _valid(digest, str)
            if self.told is None:
                self.cached, self.num_prompt = _valid(note["cached"], int), _valid(note.get("prompt", 0), int)
            self.told = version, digest
        if self.told is not None and note.get("ids") and (not self.spans or self.spans[-1][:2] != self.told):
            self.spans.append((*self.told, len(self.token_ids)))
        self.token_ids.extend(note.get("ids", ()))
        self.logprobs.extend(float("-inf") if one is None else one for one in note.get("logprobs", ()))
        self.num_chars += note.get("chars", 0)
        self.has_ended = self.has_ended or "ended" in note

    def begun(self) -> dict[str, object]:
        """Return it as a field of `begun`."""
        logprobs = [None if one == float("-inf") else one for one in self.logprobs]
        return {"token_ids": self.token_ids.tolist(), "logprobs": logprobs, "num_chars": self.num_chars,
                "cached_tokens": self.cached, "has_ended": self.has_ended, "spans": self.spans}  # fmt: skip


class Progress:
    """The part of one stream that the client has."""

    def __init__(self, check: str) -> None:
        """Start with nothing. check: "proven" or "trusted", for the worker that goes on."""
        self._check = check
        self._head: dict[str, Any] = {}
        self._guarantee: dict[str, Any] = {}
        self.parts: list[Part | None] = []  # by sequence; None: the client has nothing of it
        self.why_lost: str | None = "its worker does not report the tokens"  # why it cannot move; None: it can
        self.doubt: str | None = None  # why another worker may not be able to go on; None: it will
        self.num_tokens = 0  # that all attempts together have delivered
        self.num_notes = 0  # likewise
        self.num_events = 0  # likewise
        self.is_done = False  # whether the client has the last event
        self._has_usage = False

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, about."""
        return 16 * self.num_tokens

    @property
    def num_newest_bytes(self) -> int:
        """The memory that the newest events take."""
        return sum(len(one.newest) for one in self.parts if one is not None)

    @property
    def rids(self) -> list[str]:
        """The ids of the prompts at the first worker; none where it told none."""
        rids = self._head.get("rids")
        return rids if isinstance(rids, list) and all(isinstance(one, str) for one in rids) else []

    @property
    def open_rids(self) -> set[str]:
        """The ids of the prompts whose answers have not ended; none where the first worker told none."""
        rids = self.rids
        num = max(1, len(self.parts) // max(1, len(rids)))  # samples of each
        parts = {rid: self.parts[at * num : at * num + num] for at, rid in enumerate(rids)}
        return {rid for rid, own in parts.items() if not own or any(one is None or not one.has_ended for one in own)}

    @property
    def has_usage(self) -> bool:
        """Whether the client has the event with the usage of all sequences."""
        return self._has_usage

    def drop_newest(self) -> None:
        """Forget the newest events."""
        for one in self.parts:
            if one is not None:
                one.newest = b""

    def lose(self, why: str) -> None:
        """Forget the tokens: the stream stays where it is."""
        self.why_lost, self.parts = why, []

    def concerns(self, events: bytes) -> bool:
        """Return whether some whole events have notes, or may end the stream."""
        return any(mark in events for mark in (_MARK, *_ERRORS, *_DONE, *_LAST))

    def end_of_groups(self, events: bytes) -> int:
        """Return where the last whole group ends in some whole events, all of which may be groups of one."""
        if _GROUP.search(events) is None:
            return len(events)
        ends = [end.end() for end in _END_OF_EVENT.finditer(events)]
        at = start = 0
        while at < len(ends):
            told = _GROUP.search(events, start, ends[at])
            at += max(1, int(told[1])) if told is not None else 1
            if at > len(ends):
                return start
            start = ends[at - 1]
        return start

    def read(self, events: bytes) -> Iterator[tuple[bytes, list[dict[str, Any]]]]:
        """Yield each of some whole events without its comments, and with the notes in them, for `add`. Raises StreamCut
        at an event by which the worker ends a stream that is not at its end."""
        start = 0
        for end in _END_OF_EVENT.finditer(events):
            lines = events[start : end.start()].split(b"\n")
            start = end.end()
            rest = [line for line in lines if not line.startswith(_MARK)]
            notes = [_note(line) for line in lines if line.startswith(_MARK)]
            if why := next((note["ended"] for note in notes if note.get("ended") == SERVER_ENDED), None):
                raise StreamCut(f"it was ended: {why}")
            if rest and rest[-1].startswith(_ERRORS):
                _raise_failure(rest[-1])
            is_done = [line.rstrip(b"\r") for line in rest] == _DONE or any(line in _LAST for line in rest[:1])
            yield b"\n".join(rest) + end[0], [{"done": True}] if is_done else notes

    def add(self, notes: list[dict[str, Any]], event: bytes = b"") -> None:
        """Take the notes of an event that the client has. event: is kept as the newest one of its sequence."""
        self.num_events += 1
        try:
            for note in notes:
                self._add(note, event)
                self.num_notes += 1
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError):
            self.lose("the notes of its worker cannot be understood")

    def _add(self, note: Mapping[str, Any], event: bytes) -> None:
        if "done" in note:
            self.is_done = True
        elif "events" in note:
            pass  # of a group, which is whole
        elif "usage" in note:
            self._has_usage = True
        elif "head" in note:
            self._head, self._guarantee = _valid(note["head"], dict), _valid(note["guarantee"], dict)
            self.doubt = None if (doubt := note.get("doubt")) is None else _valid(doubt, str)
            json.dumps([self._head, self._guarantee])  # as another worker gets them: not nested too deeply for that
            if not 0 < (num := _valid(note["num_sequences"], int)) <= _MAX_SEQUENCES:
                raise ValueError(f"{num} sequences")
            self.parts, self.why_lost = [None] * num, None
        elif self.parts:
            if (index := _valid(note["index"], int)) < 0:
                raise IndexError(index)
            sequence = self.parts[index] = self.parts[index] or Part()
            sequence.add(note)
            sequence.newest = event
            self.num_tokens += len(note.get("ids", ()))

    @property
    def _digests(self) -> set[str | None]:
        """The digests of the newest tokens of all sequences."""
        return {one.spans[-1][1] for one in self.parts if one is not None and one.spans}

    def why_not(self, worker: Host) -> str | None:
        """Return why a worker cannot go on with the stream; None: it can."""
        digests = self._digests
        if not digests:
            return None  # no token is drawn yet
        if digests == {None}:
            return "the weights that drew its tokens have no digest"
        if len(digests) > 1:
            return f"its tokens are of several weights ({', '.join(sorted(map(str, digests)))})"
        [digest] = digests
        if worker.weight_digest != digest:
            return f"its weights have the digest {worker.weight_digest}, and the answer's {digest}"
        here, there = worker.guarantee or {}, self._guarantee
        if differing := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
            return "; ".join(f"its {name} is {here.get(name)}, and was {there.get(name)}" for name in differing)
        return None if here.get("invariant") else "its numbers depend on the batch"

    def begun_at(self, worker: Host) -> dict[str, object]:
        """Return the field `begun` of the call by which a worker goes on."""
        digests = self._digests
        return {
            "sequences": [None if one is None else one.begun() for one in self.parts],
            "check": self._check,
            "weight_digest": next(iter(digests)) if digests else worker.weight_digest,
            "guarantee": self._guarantee if digests else worker.guarantee,
            "head": self._head,
            "has_usage": self._has_usage,
            "num_events": self.num_events,
        }


def _valid(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _note(line: bytes) -> dict[str, Any]:
    try:
        note = json.loads(line[len(_MARK) :])
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict):
        raise WorkerFailed(f"its stream has a comment that is no note: {line[:100]!r}")
    return note


def _raise_failure(line: bytes) -> None:
    """Raise StreamCut for an event with an error of the worker's own."""
    try:
        values = json.loads(line.removeprefix(b"data: "))
        error = values.get("error", values)  # of the Responses API the event itself is the error
        code, message = error["code"], str(error["message"])
        told = error.get("status", code)
        status = told if isinstance(told, int) else _FAILED if error.get("type") in _SERVERS else 0
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    if status >= _FAILED:
        raise StreamCut(message)
