"""What steps produced for the calls that wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .completion import Completion, StreamChunk
from .request import Request


class Mailboxes:
    """One per request that some call waits for. The engine posts, under its lock; the call takes."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[StreamChunk]] = {}
        self._streamed: set[str] = set()  # the ids whose call wants every chunk, not only the answer

    def __contains__(self, id: str) -> bool:
        return id in self._boxes

    def open(self, ids: Iterable[str], *, streamed: bool) -> None:
        for id in ids:
            self._boxes[id] = []
            if streamed:
                self._streamed.add(id)

    def close(self, id: str) -> None:
        self._boxes.pop(id, None)
        self._streamed.discard(id)

    def wants_chunks(self, id: str) -> bool:
        """Whether the request's call wants what each step adds."""
        return id in self._streamed

    def post(self, request: Request, completion: Completion | None) -> None:
        """Put what is new of a request into its box; its completion, if it has ended."""
        sequence, first, start = request.sequence, request.num_tokens_streamed, request.num_chars_streamed
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + first :])
        if completion is None and len(token_ids) < (request.params.stream_interval or 1):
            return
        text = completion.text if completion is not None else request.text(final=False)
        logprobs = tuple(request.logprobs[first:])
        self._boxes[request.id].append(
            StreamChunk(request.id, request.index, token_ids, logprobs, text[start:], completion)
        )
        request.num_tokens_streamed += len(token_ids)
        request.num_chars_streamed = max(len(text), start)

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
