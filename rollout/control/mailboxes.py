"""What steps produced for the calls that wait for it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from ..completion import Completion, StreamChunk
from ..errors import EngineStopped
from ..sequences.request import Request


class Listener(Protocol):
    """Who is told instead of waiting. Called by whoever runs the steps, who holds the engine's lock: it returns at
    once and raises nothing."""

    def on_chunk(self, chunk: StreamChunk) -> None:
        """What a step added to one of its sequences; the last chunk of a sequence carries its completion."""

    def on_failure(self, error: EngineStopped) -> None:
        """The loop has ended: nothing more comes."""


class Mailboxes:
    """One per request that some call waits for. The engine posts, under its lock; the call takes, or is told."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[StreamChunk]] = {}
        self._listeners: dict[str, Listener] = {}
        self._streamed: set[str] = set()  # the ids whose call wants every chunk, not only the answer

    def __contains__(self, id: str) -> bool:
        return id in self._boxes or id in self._listeners

    def open(self, ids: Iterable[str], *, streamed: bool) -> None:
        for id in ids:
            self._boxes[id] = []
            if streamed:
                self._streamed.add(id)

    def connect(self, ids: Iterable[str], listener: Listener, *, streamed: bool) -> None:
        """Tell the listener what would be put into boxes, until each of the sequences has ended."""
        for id in ids:
            self._listeners[id] = listener
            if streamed:
                self._streamed.add(id)

    def close(self, id: str) -> None:
        self._boxes.pop(id, None)
        self._listeners.pop(id, None)
        self._streamed.discard(id)

    def ids_of(self, listeners: Container[Listener]) -> list[str]:
        """The sequences that these listeners still wait for."""
        return [id for id, listener in self._listeners.items() if listener in listeners]

    def fail(self, error: EngineStopped) -> None:
        """Tell every listener that the loop has ended."""
        for listener in set(self._listeners.values()):
            listener.on_failure(error)
        self._listeners.clear()

    def wants_chunks(self, id: str) -> bool:
        """Whether the request's call wants what each step adds."""
        return id in self._streamed

    def post(self, request: Request, completion: Completion | None) -> None:
        """Put what is new of a request into its box; its completion, if it has ended."""
        sequence, first, start = request.sequence, request.num_tokens_streamed, request.num_chars_streamed
        token_ids = tuple(sequence.settled_output(first))
        if completion is None and len(token_ids) < (request.params.stream_interval or 1):
            return
        text = completion.text if completion is not None else request.text(final=False)
        logprobs = tuple(request.logprobs[first:])
        chunk = StreamChunk(
            request.id,
            request.index,
            token_ids,
            logprobs,
            text[start:],
            sequence.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_retractions,
            completion.weight_version if completion is not None else request.span_starts[-1].version,
            tuple(request.top_logprobs[first:]),
            tuple(request.listed_logprobs[first:]),
            request.num_tokens_taken_back,
            completion,
        )
        request.num_tokens_streamed += len(token_ids)
        request.num_tokens_taken_back = 0
        request.num_chars_streamed = max(len(text), start)
        listener = self._listeners.get(request.id)
        if listener is None:
            self._boxes[request.id].append(chunk)
            return
        if completion is not None:
            self.close(request.id)
        listener.on_chunk(chunk)

    def take(self, ids: Sequence[str]) -> list[StreamChunk]:
        """Empty the boxes."""
        chunks = [chunk for id in ids for chunk in self._boxes[id]]
        for id in ids:
            self._boxes[id].clear()
        return chunks

    def has_news(self, ids: Sequence[str]) -> bool:
        return any(self._boxes[id] for id in ids)

    def all_done(self, ids: Sequence[str]) -> bool:
        boxes = [self._boxes[id] for id in ids]
        return all(box and box[-1].completion is not None for box in boxes)

    def completions(self, ids: Sequence[str]) -> list[Completion]:
        """The answers, once all are done."""
        return [self._boxes[id][-1].completion for id in ids]  # type: ignore[misc]
