"""What steps produced for the calls that wait for it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..completion import Completion, StreamChunk
from ..errors import EngineStopped
from ..sequences.output_record import OutputRecord
from ..sequences.request import Request


class Listener(Protocol):
    """Who is told instead of waiting. Called by whoever runs the steps, who holds the engine's lock: it returns at
    once and raises nothing."""

    def on_chunk(self, chunk: StreamChunk) -> None:
        """What a step added to one of its sequences; the last chunk of a sequence carries its completion."""

    def on_failure(self, error: EngineStopped) -> None:
        """The loop has ended: nothing more comes."""


@dataclass(eq=False, slots=True)
class Streamed:
    """Counts the output of a request that its call was told of."""

    num_tokens: int = 0
    num_chars: int = 0
    num_taken_back: int = 0  # tokens that were replaced since the newest chunk

    def follow(self, record: OutputRecord) -> None:
        """Take off the tokens that a rollback has reached since the last call."""
        if record.num_kept is not None:
            num_replaced = max(self.num_tokens - record.num_kept, 0)
            self.num_tokens -= num_replaced
            self.num_taken_back += num_replaced
            record.num_kept = None


@dataclass(eq=False, slots=True)
class _Mailbox:
    wants_chunks: bool  # every one, not only the answer
    listener: Listener | None = None  # told instead of `chunks`
    chunks: list[StreamChunk] = field(default_factory=list)
    streamed: Streamed = field(default_factory=Streamed)


class Mailboxes:
    """One per request that some call waits for. The engine posts, under its lock; the call takes, or is told."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Mailbox] = {}
        self._unclaimed: list[Completion] = []  # answers that no mailbox was there for

    def __len__(self) -> int:
        return len(self._boxes)

    # -- for the calls ----------------------------------------------------------------------------------------------

    def open(self, ids: Iterable[str], *, streamed: bool) -> None:
        """Keep what comes of these requests until `close`."""
        for id in ids:
            self._boxes[id] = _Mailbox(streamed)

    def connect(self, ids: Iterable[str], listener: Listener, *, streamed: bool) -> None:
        """Tell the listener what would be put into boxes, until each of the sequences has ended."""
        for id in ids:
            self._boxes[id] = _Mailbox(streamed, listener)

    def close(self, id: str) -> None:
        """Keep nothing more for this request. Does nothing where there is no box."""
        self._boxes.pop(id, None)

    def ids_of(self, listeners: Container[Listener]) -> list[str]:
        """The sequences that these listeners still wait for."""
        return [id for id, box in self._boxes.items() if box.listener is not None and box.listener in listeners]

    def take(self, ids: Sequence[str]) -> list[StreamChunk]:
        """Empty the boxes."""
        chunks = [chunk for id in ids for chunk in self._boxes[id].chunks]
        for id in ids:
            self._boxes[id].chunks.clear()
        return chunks

    def take_unclaimed(self) -> list[Completion]:
        """Return the answers that no call waited for, once."""
        answers, self._unclaimed = self._unclaimed, []
        return answers

    def has_news(self, ids: Sequence[str]) -> bool:
        return any(self._boxes[id].chunks for id in ids)

    def all_done(self, ids: Sequence[str]) -> bool:
        boxes = [self._boxes[id].chunks for id in ids]
        return all(chunks and chunks[-1].completion is not None for chunks in boxes)

    def completions(self, ids: Sequence[str]) -> list[Completion]:
        """The answers, once all are done."""
        return [self._boxes[id].chunks[-1].completion for id in ids]  # type: ignore[misc]

    # -- for the loop (its `Answers`) -------------------------------------------------------------------------------

    def on_token(self, request: Request) -> None:
        """Post a request's new tokens where its call wants every chunk."""
        box = self._boxes.get(request.id)
        if box is not None and box.wants_chunks:
            self._post(box, request, None)

    def on_answer(self, request: Request, completion: Completion) -> None:
        """Post a request's last chunk, with its completion, or keep the completion for `take_unclaimed`."""
        box = self._boxes.get(request.id)
        if box is not None:
            self._post(box, request, completion)
        else:
            self._unclaimed.append(completion)

    def on_failure(self, error: EngineStopped) -> None:
        """Tell every listener that the loop has ended."""
        told = {id: box.listener for id, box in self._boxes.items() if box.listener is not None}
        for listener in set(told.values()):
            listener.on_failure(error)
        for id in told:
            self.close(id)

    def _post(self, box: _Mailbox, request: Request, completion: Completion | None) -> None:
        sequence, record, streamed = request.sequence, request.record, box.streamed
        streamed.follow(record)
        first, start = streamed.num_tokens, streamed.num_chars
        token_ids = tuple(sequence.settled_output(first))
        if completion is None and len(token_ids) < (request.params.stream_interval or 1):
            return
        text = completion.text if completion is not None else request.text(final=False)
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
            completion,
        )
        streamed.num_tokens += len(token_ids)
        streamed.num_chars = max(len(text), start)
        streamed.num_taken_back = 0
        if box.listener is None:
            box.chunks.append(chunk)
            return
        if completion is not None:
            self.close(request.id)
        box.listener.on_chunk(chunk)
