"""The mailboxes of waiting calls: chunks and completions that steps have produced."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ...completion import Completion, StreamChunk
from ...errors import BrokenLogits, EngineStopped
from ...sequences.output_record import OutputRecord
from ...sequences.request import Request


class Listener(Protocol):
    """A receiver of chunks, for callers that do not wait.

    The thread that runs the steps calls it under the engine's lock, so a method returns at once and raises nothing.
    """

    def on_chunk(self, chunk: StreamChunk) -> None:
        """Take the new tokens of one sequence; the last chunk of a sequence carries its completion."""

    def on_failure(self, error: EngineStopped) -> None:
        """Take the error that ended the loop. It is the last call."""


@dataclass(eq=False, slots=True)
class Streamed:
    """Count the output of a request that its call has received."""

    num_tokens: int = 0
    num_chars: int = 0
    num_taken_back: int = 0  # tokens that were replaced since the newest chunk
    num_chars_taken_back: int = 0  # likewise

    def follow(self, record: OutputRecord) -> None:
        """Subtract the tokens that a rollback has replaced since the last call."""
        if record.num_kept is not None:
            num_replaced = max(self.num_tokens - record.num_kept, 0)
            self.num_tokens -= num_replaced
            self.num_taken_back += num_replaced
            record.num_kept = None
        if record.num_chars_kept is not None:
            num_replaced = max(self.num_chars - record.num_chars_kept, 0)
            self.num_chars -= num_replaced
            self.num_chars_taken_back += num_replaced
            record.num_chars_kept = None


@dataclass(eq=False, slots=True)
class Mailbox:
    """The output of one request that its call has not taken."""

    wants_chunks: bool  # every chunk, not only the answer
    listener: Listener | None = None  # receives the chunks instead of `chunks`
    chunks: list[StreamChunk] = field(default_factory=list)
    streamed: Streamed = field(default_factory=Streamed)


class Mailboxes:
    """One mailbox per request that a call waits for. The engine posts under its lock; the call or a listener takes."""

    def __init__(self, opening: AbstractContextManager[object]) -> None:
        """Make no mailbox yet. opening: the lock under which calls open theirs, which is not the engine's."""
        self._opening = opening
        self._boxes: dict[str, Mailbox] = {}
        self._unclaimed: list[Completion] = []  # answers of requests without a mailbox
        self._broken: dict[str, BrokenLogits] = {}  # errors for the calls that wait for these requests
        self._kept_ids: set[str] = set()  # of requests that have ended and are not answered yet

    def __len__(self) -> int:
        return len(self._boxes)

    def keeps_id(self, id: str) -> bool:
        """Return whether a request of this id has ended and is not answered yet. The caller holds the lock of calls
        that open mailboxes."""
        return id in self._kept_ids

    # -- for the calls ----------------------------------------------------------------------------------------------

    def open(self, ids: Iterable[str], *, streamed: bool) -> dict[str, Mailbox]:
        """Keep the output of these requests until `close`. Returns their mailboxes."""
        boxes = {id: Mailbox(streamed) for id in ids}
        self._boxes |= boxes
        return boxes

    def connect(self, ids: Iterable[str], listener: Listener, *, streamed: bool) -> None:
        """Send the output of these requests to the listener until each of them has ended."""
        for id in ids:
            self._boxes[id] = Mailbox(streamed, listener)

    def close(self, id: str, box: Mailbox | None = None) -> None:
        """Remove the mailbox of this request, if there is one. box: only if it is this one, and not that of a later
        request of the same id."""
        if box is None or self.is_open(id, box):
            self._boxes.pop(id, None)
            self._broken.pop(id, None)

    def is_open(self, id: str, box: Mailbox) -> bool:
        """Return whether this is still the mailbox of that id."""
        return self._boxes.get(id) is box

    def of(self, listeners: Container[Listener]) -> dict[str, Mailbox]:
        """Return the mailboxes of the sequences that these listeners still wait for, by id."""
        with self._opening:
            boxes = list(self._boxes.items())
        return {id: box for id, box in boxes if box.listener is not None and box.listener in listeners}

    def take(self, ids: Sequence[str]) -> list[StreamChunk]:
        """Return the chunks in these mailboxes and empty them. Raises BrokenLogits of these requests."""
        self._raise_broken(ids)
        chunks = [chunk for id in ids for chunk in self._boxes[id].chunks]
        for id in ids:
            self._boxes[id].chunks.clear()
        return chunks

    def take_unclaimed(self) -> list[Completion]:
        """Return and clear the answers that no call waited for."""
        answers, self._unclaimed = self._unclaimed, []
        return answers

    def has_news(self, ids: Sequence[str]) -> bool:
        return any(self._boxes[id].chunks for id in ids)

    def when_done(self, ids: Sequence[str]) -> Callable[[], bool]:
        """Return a function that says whether all answers are there, or an error that `completions` raises. It looks at
        each answer that is there once, however often it is asked."""
        first = 0  # that may not be there

        def are_done() -> bool:
            nonlocal first
            if self._broken and not self._broken.keys().isdisjoint(ids):
                return True
            at = first  # the call's own thread and the one that runs the steps may ask at once: each counts for itself
            while at < len(ids) and (chunks := self._boxes[ids[at]].chunks) and chunks[-1].completion is not None:
                at += 1
            first = at
            return at == len(ids)

        return are_done

    def completions(self, ids: Sequence[str]) -> list[Completion]:
        """Return the answers. Call it when all are done. Raises BrokenLogits of these requests."""
        self._raise_broken(ids)
        return [self._boxes[id].chunks[-1].completion for id in ids]  # type: ignore[misc]

    def _raise_broken(self, ids: Sequence[str]) -> None:
        if broken := [id for id in ids if id in self._broken]:
            error = self._broken[broken[0]]
            raise BrokenLogits(str(error), broken) from error

    # -- for the loop (its `Answers`) -------------------------------------------------------------------------------

    def on_token(self, request: Request) -> None:
        """Post a request's new tokens if its call wants every chunk."""
        box = self._boxes.get(request.id)
        if box is not None and box.wants_chunks and not request.options.stream_when_final:
            self._post(box, request, None)

    def wants_tokens(self, request: Request) -> bool:
        """Return whether the request's call wants every chunk, when it comes."""
        box = self._boxes.get(request.id)
        return box is not None and box.wants_chunks and not request.options.stream_when_final

    def keep_id(self, id: str) -> None:
        """Let no other request take the id of one that ends, until its mailbox is closed or `free_id`."""
        with self._opening:  # a call that looks for the id now has seen the sequence, or will see this
            self._kept_ids.add(id)

    def free_id(self, id: str) -> None:
        """Let others take a kept id, if it is kept still."""
        self._kept_ids.discard(id)

    def on_answer(self, request: Request, completion: Completion) -> None:
        """Post a request's last chunk, with its completion, or keep the completion for `take_unclaimed`."""
        box = self._boxes.get(request.id)
        if box is not None:
            self._post(box, request, completion)
        else:
            self._unclaimed.append(completion)

    def on_broken(self, error: BrokenLogits, ids: Sequence[str]) -> list[str]:
        """Keep the error for the calls that wait for these requests themselves, which raise it; return the ids of those
        that have one. Others are a listener's, or no call's."""
        boxes = {id: self._boxes.get(id) for id in ids}
        awaited = [id for id, box in boxes.items() if box is not None and box.listener is None]
        self._broken |= dict.fromkeys(awaited, error)
        return awaited

    def on_failure(self, error: EngineStopped) -> None:
        """Send every listener the error that ended the loop, and remove the listeners' mailboxes."""
        with self._opening:
            boxes = list(self._boxes.items())
        listeners = {id: box.listener for id, box in boxes if box.listener is not None}
        for listener in set(listeners.values()):
            listener.on_failure(error)
        for id in listeners:
            self.close(id)

    def _post(self, box: Mailbox, request: Request, completion: Completion | None) -> None:
        sequence, record, streamed = request.sequence, request.record, box.streamed
        streamed.follow(record)
        first, start = streamed.num_tokens, streamed.num_chars
        token_ids = tuple(sequence.settled_output(first))
        if completion is None and len(token_ids) < (request.params.stream_interval or 1):
            return
        text = completion.text if completion is not None else request.text(final=False)
        spans = record.span_starts
        chunk = StreamChunk(
            request.id,
            request.index,
            token_ids,
            tuple(record.logprobs[first:]),
            text[start:],
            sequence.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_retractions,
            completion.weight_version if completion is not None else record.span_starts[-1].version,
            tuple(record.top_logprobs[first:]),
            tuple(record.listed_logprobs[first:]),
            streamed.num_taken_back,
            streamed.num_chars_taken_back,
            completion,
            # Over kept KV they are of several weights.
            spans[-1].digest if spans and spans[-1].start <= first and not record.kept_kv else None,
        )
        streamed.num_tokens += len(token_ids)
        streamed.num_chars = max(len(text), start)
        streamed.num_taken_back = streamed.num_chars_taken_back = 0
        if box.listener is None:
            box.chunks.append(chunk)
            return
        if completion is not None:
            self.close(request.id)
            self.free_id(request.id)  # before the caller hears of its answer, and asks again under the id
        box.listener.on_chunk(chunk)
