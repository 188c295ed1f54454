"""The seam in a stream that goes on at this server, and the comments by which it could go on at another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ....rollout.completion import Completion, StreamChunk
from ....rollout.engine import Engine
from ....rollout.receipt import guarantee
from ..edge.errors import HttpError
from .going_on import BegunSequence, Moving, named, progress_line

_END = b"\n\n"  # of an event


class Seam:
    """The sequences of one streamed answer. Used by its event loop."""

    def __init__(self, moving: Moving, engine: Engine, head: Mapping[str, object] | None = None) -> None:
        """Follow a request that was queued. head: what the answer's events repeat, for the next server."""
        self._wants_progress, begun = moving.wants_progress, moving.begun
        self._names = moving.names if begun is not None else None
        doubt = moving.doubts[0] if moving.doubts else ""
        self._known = [_Known(one, doubt) for one in begun.sequences] if begun is not None else None
        self._told: dict[int, tuple[str | None, str, int]] = {}  # by sequence: digest, version, cached tokens
        self._has_usage = begun is not None and begun.has_usage
        self._head = b""
        if self._wants_progress and begun is None:
            values = {"rids": moving.rids, **(head or {})}
            told = {"head": values, "guarantee": guarantee(engine.model), "num_sequences": len(moving.names)}
            self._head = progress_line(told | ({"doubt": doubt} if doubt else {}))

    def has_begun(self, index: int) -> bool:
        """Return whether the client has the first event of a sequence."""
        return self._known is not None and self._known[index].begun is not None

    @property
    def has_events(self) -> bool:
        """Whether the client has events of the stream."""
        return self._known is not None and any(one.begun is not None for one in self._known)

    @property
    def has_usage(self) -> bool:
        """Whether the client has the event with the usage of all sequences."""
        return self._has_usage

    def group(self, events: bytes) -> bytes:
        """Return events that belong to one output, with a comment that says how many they are where they are several: a
        router has all of them before the client has any, so that a stream is cut between groups only."""
        num = events.count(_END) if self._wants_progress else 0
        return progress_line({"events": num}) + events if num > 1 else events

    def usage_note(self) -> bytes:
        """Make the comment of that event."""
        return progress_line({"usage": True}) if self._wants_progress else b""

    def parts(self, index: int, chunks: Sequence[StreamChunk]) -> tuple[list[StreamChunk], list[StreamChunk]]:
        """Divide the output of a sequence into what the client has, and what is new. Raises HttpError 409 for a token
        that is drawn again and is another one."""
        if self._known is None or self._names is None:
            return [], list(chunks)
        known, fresh = [], []
        for chunk in chunks:
            before, after = self._known[index].divide(chunk)
            known += [] if before is None else [self._named(index, before)]
            fresh += [] if after is None else [self._named(index, after)]
        return known, fresh

    def _named(self, index: int, chunk: StreamChunk) -> StreamChunk:
        assert self._known is not None and self._names is not None
        name, begun, completion = self._names[index], self._known[index].begun, chunk.completion
        cached = chunk.num_cached_tokens if begun is None else begun.cached_tokens
        if completion is not None:
            completion = named(completion, name, begun)
        return replace(chunk, id=name, num_cached_tokens=cached, completion=completion)

    def completion(self, index: int, completion: Completion) -> Completion:
        """Return the answer of a sequence as its first server would have made it. Raises HttpError 409 as `parts`."""
        if self._known is None or self._names is None:
            return completion
        known = self._known[index]
        known.check(completion)
        return named(completion, self._names[index], known.begun)

    def notes(self, index: int, chunks: Sequence[StreamChunk] = ()) -> bytes:
        """Make the comments of an event with this output; without output, of a sequence's first event."""
        if not self._wants_progress:
            return b""
        lines, self._head = [self._head], b""
        lines += [progress_line(self._note(index, chunk)) for chunk in chunks] or [progress_line({"index": index})]
        return b"".join(lines)

    def _note(self, index: int, chunk: StreamChunk) -> dict[str, object]:
        logprobs = [one if math.isfinite(one) else None for one in chunk.logprobs]
        note: dict[str, object] = {"index": index, "ids": chunk.token_ids, "logprobs": logprobs,
                                   "chars": len(chunk.text)}  # fmt: skip
        if chunk.num_taken_back or chunk.num_chars_taken_back:
            note |= {"taken_back": chunk.num_taken_back, "chars_taken_back": chunk.num_chars_taken_back}
        told = chunk.weight_digest, chunk.weight_version, chunk.num_cached_tokens
        if chunk.token_ids and self._told.get(index) != told:
            self._told[index] = told
            note |= dict(zip(("digest", "version", "cached"), told, strict=True)) | {"prompt": chunk.num_prompt_tokens}
        if chunk.completion is not None:
            reason = chunk.completion.finish_reason
            note["ended"] = True if reason is None or reason.type != "abort" else reason.message or "Aborted"
        return note


class _Other(NamedTuple):
    """An output token that is another one than the client has."""

    at: int
    why: str


class _Known:
    """The part of one sequence that the client has, while it comes again."""

    def __init__(self, begun: BegunSequence | None, doubt: str) -> None:
        """Compare with what the client has. doubt: why other tokens may come first, which later ones replace; "": they
        cannot."""
        self.begun, self._doubt = begun, doubt
        self._other: _Other | None = None  # the first token that came and is another one, which may be replaced
        self._num_tokens = self._num_chars = 0  # that have come again
        self._is_over = begun is None

    def divide(self, chunk: StreamChunk) -> tuple[StreamChunk | None, StreamChunk | None]:
        """Divide a step's output where what the client has ends. Raises HttpError 409."""
        begun = self.begun
        if self._is_over or begun is None:
            return None, chunk
        has_all = self._other is None and self._num_tokens == len(begun.token_ids)
        if has_all and chunk.num_taken_back and not begun.has_ended:
            self._is_over = True  # the client has all tokens that this step replaces
            return None, chunk
        self._num_tokens = max(self._num_tokens - chunk.num_taken_back, 0)
        self._num_chars = max(self._num_chars - chunk.num_chars_taken_back, 0)
        if not self._comes_again(chunk):
            self._num_tokens += len(chunk.token_ids)
            self._num_chars += len(chunk.text)
            return chunk, None
        num = min(len(begun.token_ids) - self._num_tokens, len(chunk.token_ids))
        self._num_tokens += num
        is_all = self._num_tokens == len(begun.token_ids)
        has_more = len(chunk.token_ids) > num or (chunk.completion is not None and not begun.has_ended)
        if chunk.completion is not None and not is_all:
            raise self._ended(self._num_tokens, chunk.completion)
        if begun.has_ended and len(chunk.token_ids) > num:
            raise self._diverged(self._num_tokens, "the answer goes on here")
        if not is_all or not has_more:
            self._num_chars += len(chunk.text)
            return chunk, None
        self._is_over = True
        cut = begun.num_chars - self._num_chars
        known = replace(
            chunk, token_ids=chunk.token_ids[:num], logprobs=chunk.logprobs[:num], text=chunk.text[:cut],
            top_logprobs=chunk.top_logprobs[:num], listed_logprobs=chunk.listed_logprobs[:num], completion=None,
        )  # fmt: skip
        fresh = replace(
            chunk, token_ids=chunk.token_ids[num:], logprobs=chunk.logprobs[num:], text=chunk.text[cut:],
            top_logprobs=chunk.top_logprobs[num:], listed_logprobs=chunk.listed_logprobs[num:],
            num_taken_back=0, num_chars_taken_back=0,
        )  # fmt: skip
        return known, fresh

    def _comes_again(self, chunk: StreamChunk) -> bool:
        """Return whether the output up to this chunk's end is what the client has, or begins with it. Raises HttpError
        409 where it is another one and no later step may replace it."""
        begun = self.begun
        assert begun is not None
        if self._other is None or self._num_tokens <= self._other.at:
            num = min(len(begun.token_ids) - self._num_tokens, len(chunk.token_ids))
            self._other = self._compare(self._num_tokens, chunk.token_ids[:num], chunk.logprobs[:num])
        if self._other is not None and (not self._doubt or chunk.completion is not None):
            raise self._diverged(*self._other)
        return self._other is None

    def check(self, completion: Completion) -> None:
        """Check a whole answer. Raises HttpError 409 where it does not begin with what is known."""
        begun = self.begun
        if begun is None:
            return
        num = len(begun.token_ids)
        if len(completion.token_ids) < num:
            raise self._ended(len(completion.token_ids), completion)
        if (other := self._compare(0, completion.token_ids[:num], completion.logprobs[:num])) is not None:
            raise self._diverged(*other)

    def _compare(self, start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> _Other | None:
        """Return the first of these tokens, from number `start` on, that is another one; None: all are the client's."""
        begun = self.begun
        assert begun is not None
        for at, (drawn, logprob) in enumerate(zip(token_ids, logprobs, strict=True), start):
            told = begun.logprobs[at]
            if drawn != begun.token_ids[at]:
                return _Other(at, f"token {begun.token_ids[at]} was claimed, and {drawn} is drawn")
            if logprob != told and not (told is None and not math.isfinite(logprob)):
                return _Other(at, f"the log-probability {told} was claimed, and {logprob} comes out")
        return None

    def _ended(self, at: int, completion: Completion) -> HttpError:
        """Make the error of an answer that ends before all that the client has has come again."""
        reason = completion.finish_reason
        if reason is not None and reason.type == "abort":
            return HttpError(409, f"the begun answer was aborted: {reason.message}", code="aborted")
        return self._diverged(at, "the answer ends here")

    def _diverged(self, at: int, why: str) -> HttpError:
        doubt = f" ({self._doubt})" if self._doubt else ""
        return HttpError(409, f"the begun answer is not proven: at output token {at} {why}{doubt}", code="not_proven")
