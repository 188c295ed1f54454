"""Encode and decode the controller's messages to its followers about a step.

A step's message is a stream of int32 words: the events of the worker manager since the last message, in order, then the
step to run, if any. After its first entry a sequence is a handle, and a sequence that decodes its next token is one
word:

    decode row, no new blocks      ~handle
    other rows                     handle, start, rows, n, n blocks
    first entry                    handle, start, rows, n, n blocks, incarnation, t, t tokens, c, c bytes of JSON,
                                   number of its images (0: none), and with one: b, b bytes of them (0: sent before)
    table cut, or with a grammar   ~n in the place of n; after the blocks: blocks kept or -1, tokens rolled back,
                                   j, j tokens of the jump, m, m words of mask (0: none)
    with recurrent layers          after any of these: the slots of states that are read and written
    with a draft                   ~rows in the place of rows; at the end: d, d tokens, d times m, m words of mask, and
                                   with recurrent layers d slots
    result: one row, one token     handle, token
    other results                  ~handle, rows, token or -1, prompt log-probabilities recorded, a, a accepted tokens

Both ends number handles in the same order of events. `EventWriter` and `EventReader` are pure: no tensors, no ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from ..grammars.jump import Jump
from ..sequences.request import Request
from ..sequences.step import Draft, NewToken, ScheduledSequence, ScheduleOutput, SequenceResult, StateSlots
from .request_json import request_json, request_of
from .shared_images import ReceivedImages, SentImages


class Op(IntEnum):
    """The kind of the next entry in a stream."""

    SCHEDULE = 1  # step, p, p preempted, e, e exhausted, s, s entries
    RESULTS = 2  # r, r entries
    CANCELLED = 3  # c, c handles
    PREEMPT = 4  # handle
    FREE = 5  # handle
    CHECK = 6  # 8 words of the state's hash
    RUN = 7  # step: run it now


class FollowedState(Protocol):
    """The manager's state that a decode row omits, since the managers of both ends know it."""

    def incarnation(self, id: str) -> int: ...

    def next_row(self, id: str) -> int:
        """Return the sequence's first row that has not gone through this stage."""
        ...


@dataclass(frozen=True)
class Order:
    """One decoded event of a message: an operation of the follower and its argument."""

    op: Op
    value: Any


class EventWriter:
    """The controller's end. It collects the events since the last message."""

    def __init__(self, has_states: bool = False) -> None:
        """Create a writer without events. has_states: the model has recurrent layers."""
        self._has_states = has_states
        self._words = array("i")
        self._handles: dict[str, int] = {}
        self._num_handles = 0
        self._images = SentImages()

    def __contains__(self, id: str) -> bool:
        return id in self._handles

    def schedule(self, output: ScheduleOutput, manager: FollowedState, requests: Mapping[str, Request]) -> None:
        """Write a schedule. The manager must not have it yet. requests: of the sequences without a handle."""
        words = self._words
        words.extend((Op.SCHEDULE, output.step, len(output.preempted)))
        words.extend(self._handles[id] for id in output.preempted)
        words.append(len(output.exhausted))
        words.extend(self._handles[id] for id, _ in output.exhausted)
        words.append(len(output.scheduled))
        for item in output.scheduled:
            handle = self._handles.get(item.id)
            has_draft = bool(item.draft.token_ids)
            is_constrained = item.allowed is not None or bool(item.jump) or item.num_blocks_kept is not None
            if (
                handle is not None
                and item.num_tokens == 1
                and not item.new_blocks
                and not is_constrained
                and not has_draft
                and item.start == manager.next_row(item.id)
            ):
                words.append(~handle)
                self._name_slots(item)
                continue
            words.append(self._num_handles if handle is None else handle)
            num_blocks = len(item.new_blocks)
            words.extend((item.start, ~item.num_tokens if has_draft else item.num_tokens))
            words.append(~num_blocks if is_constrained else num_blocks)
            words.extend(item.new_blocks)
            if is_constrained:
                self._constrain(item)
            if handle is None:
                self._introduce(item, requests[item.id])
            self._name_slots(item)
            if has_draft:
                self._draft(item.draft)

    def _name_slots(self, item: ScheduledSequence) -> None:
        if self._has_states:
            assert item.states is not None
            self._words.extend(item.states)

    def _introduce(self, item: ScheduledSequence, request: Request) -> None:
        assert item.token_ids is not None
        self._handles[item.id] = self._num_handles
        self._num_handles += 1
        num_prompt = len(item.token_ids) if item.num_prompt_tokens is None else item.num_prompt_tokens
        text = request_json(request, len(item.token_ids) - num_prompt)
        self._words.extend((item.incarnation, len(item.token_ids), *item.token_ids, len(text)))
        self._words.frombytes(text + bytes(-len(text) % 4))
        if request.images is None:
            self._words.append(0)
            return
        number, data = self._images.introduce(item.id, request.images)
        self._words.extend((number, len(data)))
        self._words.frombytes(data + bytes(-len(data) % 4))

    def _constrain(self, item: ScheduledSequence) -> None:
        num_kept = -1 if item.num_blocks_kept is None else item.num_blocks_kept
        self._words.extend((num_kept, item.jump.num_rolled_back, len(item.jump.token_ids), *item.jump.token_ids))
        self._mask(item.allowed)

    def _mask(self, allowed: bytes | None) -> None:
        allowed = allowed or b""
        self._words.append(len(allowed) // 4)
        self._words.frombytes(allowed)

    def _draft(self, draft: Draft) -> None:
        self._words.extend((len(draft.token_ids), *draft.token_ids))
        for mask in draft.allowed or (None,) * len(draft.token_ids):
            self._mask(mask)
        if self._has_states:
            self._words.extend(draft.states)

    def results(self, results: Iterable[SequenceResult]) -> None:
        """Write the committed results of a step."""
        entries = [result for result in results if result.id in self._handles]
        self._words.extend((Op.RESULTS, len(entries)))
        for result in entries:
            handle, num_scored = self._handles[result.id], len(result.prompt_logprobs)
            token = -1 if result.token_id is None else result.token_id
            if result.num_tokens == 1 and token >= 0 and not num_scored and not result.accepted:
                self._words.extend((handle, token))
            else:
                accepted = [new.token_id for new in result.accepted]
                self._words.extend((~handle, result.num_tokens, token, num_scored, len(accepted), *accepted))

    def cancelled(self, items: Sequence[ScheduledSequence]) -> None:
        self._words.extend((Op.CANCELLED, len(items), *(self._handles[item.id] for item in items)))

    def preempt(self, id: str) -> None:
        self._words.extend((Op.PREEMPT, self._handles[id]))

    def free(self, id: str) -> None:
        self._words.extend((Op.FREE, self._handles.pop(id)))
        self._images.free(id)

    def check(self, state_hash: str) -> None:
        """Write the SHA-256 (hex) with which followers compare their state."""
        self._words.append(Op.CHECK)
        self._words.frombytes(bytes.fromhex(state_hash))

    def run(self, step: int) -> None:
        self._words.extend((Op.RUN, step))

    def take(self) -> bytes:
        """Return the message and begin an empty one."""
        words, self._words = self._words, array("i")
        return words.tobytes()


class EventReader:
    """A follower's end. It decodes messages into orders."""

    def __init__(self, has_states: bool = False) -> None:
        """Create a reader for a writer that was made with the same `has_states`."""
        self._has_states = has_states
        self._ids: dict[int, str] = {}
        self._images = ReceivedImages()

    def read(self, message: bytes, manager: FollowedState) -> Iterator[Order]:
        """Decode a message into orders. Execute each order before you take the next: its decode rows need the manager's
        newest state."""
        words = array("i")
        words.frombytes(message)
        at = 0
        while at < len(words):
            op = Op(words[at])
            value, at = _READERS[op](self, words, at + 1, manager)
            yield Order(op, value)

    def _schedule(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        step, num = words[at], words[at + 1]
        preempted = [self._ids[h] for h in words[at + 2 : at + 2 + num]]
        at += 2 + num
        num = words[at]
        exhausted = [(self._ids[h], "") for h in words[at + 1 : at + 1 + num]]
        at += 1 + num
        num, at = words[at], at + 1
        items, requests = [], []
        for _ in range(num):
            item, request, at = self._entry(words, at, manager)
            if self._has_states:
                item, at = item._replace(states=StateSlots(*words[at : at + 2])), at + 2
            if item.num_tokens < 0:
                draft, at = self._read_draft(words, at)
                item = item._replace(num_tokens=~item.num_tokens, draft=draft)
            items.append(item)
            if request is not None:
                requests.append(request)
        if preempted:  # a preempted sequence that is scheduled again in this step has its next incarnation
            items = [item._replace(incarnation=item.incarnation + (item.id in preempted)) for item in items]
        output = ScheduleOutput(step, tuple(items), tuple(preempted), exhausted=tuple(exhausted))
        return (output, requests), at

    def _entry(self, words: array, at: int, manager: FollowedState) -> tuple[ScheduledSequence, Request | None, int]:
        word = words[at]
        if word < 0:
            id = self._ids[~word]
            return ScheduledSequence(id, manager.incarnation(id), manager.next_row(id), 1, (), None), None, at + 1
        start, rows, num_blocks = words[at + 1 : at + 4]
        is_constrained = num_blocks < 0
        num_blocks = ~num_blocks if is_constrained else num_blocks
        at += 4 + num_blocks
        blocks = tuple(words[at - num_blocks : at])
        constraint, at = _constraint(words, at) if is_constrained else ({}, at)
        if (known := self._ids.get(word)) is not None:
            again = ScheduledSequence(known, manager.incarnation(known), start, rows, blocks, None, **constraint)
            return again, None, at
        incarnation, num_tokens = words[at : at + 2]
        token_ids, at = tuple(words[at + 2 : at + 2 + num_tokens]), at + 2 + num_tokens
        text, at = _bytes_at(words, at)
        number, at, images = words[at], at + 1, None
        if number:
            data, at = _bytes_at(words, at)
            images = self._images.of(number, data)
        request = request_of(text, token_ids, images)
        if number:
            self._images.use(request.id, number)
        self._ids[word] = request.id
        item = ScheduledSequence(
            request.id, incarnation, start, rows, blocks, token_ids, **constraint,
            num_prompt_tokens=request.sequence.num_prompt_tokens,
        )  # fmt: skip
        return item, request, at

    def _read_draft(self, words: array, at: int) -> tuple[Draft, int]:
        num = words[at]
        token_ids, at = tuple(words[at + 1 : at + 1 + num]), at + 1 + num
        masks = []
        for _ in range(num):
            mask, at = _mask(words, at)
            masks.append(mask)
        num_slots = num if self._has_states else 0
        slots = tuple(words[at : at + num_slots])
        return Draft(token_ids, tuple(masks) if any(masks) else (), slots), at + num_slots

    def _results(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        num, at = words[at], at + 1
        results = []
        for _ in range(num):
            word = words[at]
            if word >= 0:
                id = self._ids[word]
                results.append(SequenceResult(id, manager.incarnation(id), 1, words[at + 1]))
                at += 2
            else:
                id, (rows, token, num_scored, num_accepted) = self._ids[~word], words[at + 1 : at + 5]
                at += 5 + num_accepted
                accepted = tuple(_accepted(token_id) for token_id in words[at - num_accepted : at])
                results.append(
                    SequenceResult(
                        id, manager.incarnation(id), rows, None if token < 0 else token,
                        prompt_logprobs=(0.0,) * num_scored, accepted=accepted,
                    )
                )  # fmt: skip
        return results, at

    def _cancelled(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        num = words[at]
        items = [ScheduledSequence(self._ids[h], 0, 0, 0, (), None) for h in words[at + 1 : at + 1 + num]]
        return items, at + 1 + num

    def _preempt(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        return self._ids[words[at]], at + 1

    def _free(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        id = self._ids.pop(words[at])
        self._images.free(id)
        return id, at + 1

    def _check(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        return words[at : at + 8].tobytes().hex(), at + 8

    def _run(self, words: array, at: int, manager: FollowedState) -> tuple[Any, int]:
        return words[at], at + 1


def _constraint(words: array, at: int) -> tuple[dict[str, Any], int]:
    """Decode the words that a grammar adds to an entry."""
    num_kept, num_rolled_back, num_jumped = words[at : at + 3]
    at += 3 + num_jumped
    jump = Jump(num_rolled_back, tuple(words[at - num_jumped : at]))
    allowed, at = _mask(words, at)
    return {"jump": jump, "num_blocks_kept": None if num_kept < 0 else num_kept, "allowed": allowed}, at


def _mask(words: array, at: int) -> tuple[bytes | None, int]:
    end = at + 1 + words[at]
    return words[at + 1 : end].tobytes() or None, end


def _bytes_at(words: array, at: int) -> tuple[bytes, int]:
    """Return the bytes whose number stands in a word, and the word behind them."""
    num_bytes, num_words = words[at], -(-words[at] // 4)
    return words[at + 1 : at + 1 + num_words].tobytes()[:num_bytes], at + 1 + num_words


def _accepted(token_id: int) -> NewToken:
    """Return an accepted token as a follower knows it, which reads its id only."""
    return NewToken(token_id, 0.0, (), (), False, False, None)


_Reader = Callable[[EventReader, array, int, FollowedState], tuple[Any, int]]
_READERS: dict[Op, _Reader] = {
    Op.SCHEDULE: EventReader._schedule,
    Op.RESULTS: EventReader._results,
    Op.CANCELLED: EventReader._cancelled,
    Op.PREEMPT: EventReader._preempt,
    Op.FREE: EventReader._free,
    Op.CHECK: EventReader._check,
    Op.RUN: EventReader._run,
}
