"""The writers of streams: each makes the events of one API of the chunks of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..edge.errors import HttpError, error_body
from ..generation.going_on import Moving
from ..generation.sse import DONE, dumps, event, event_of


class Writer(Protocol):
    """The events of one stream, made of the chunks that OpenAI's API has. Chunks that the client has already are
    written too, so that the writer knows where the stream is, and what it returns is not sent."""

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """Make the events of a chunk; there may be none."""

    def resume(self, num_events: int) -> None:
        """Note that the client has so many events of the stream, and not yet those of the chunks that follow."""

    def failed(self, error: HttpError) -> bytes:
        """Make the event of an error, after which no chunk comes."""

    def end(self) -> bytes:
        """Make what comes last, also after an error."""


class ChunkWriter:
    """The events of OpenAI's own stream."""

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """See `Writer.chunk`."""
        return event_of(chunk)

    def resume(self, num_events: int) -> None:
        """See `Writer.resume`. These events have no numbers."""

    def failed(self, error: HttpError) -> bytes:
        """See `Writer.failed`."""
        return event(dumps(error_body(error, openai=True)))

    def end(self) -> bytes:
        """See `Writer.end`."""
        return DONE


class SeamWriter:
    """A writer of a stream that another server has begun."""

    def __init__(self, writer: Writer, moving: Moving) -> None:
        """Begin with what the client has, if it has something."""
        self._writer = writer
        self._num_events = 0 if moving.begun is None else moving.begun.num_events  # that the writer does not know of

    def pass_seam(self) -> None:
        """Note that all chunks from now on are new to the client. Idempotent."""
        if self._num_events:
            self._writer.resume(self._num_events)
            self._num_events = 0

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """See `Writer.chunk`. One without a choice, which is the last, is new."""
        if not chunk["choices"]:
            self.pass_seam()
        return self._writer.chunk(chunk)

    def failed(self, error: HttpError) -> bytes:
        """See `Writer.failed`."""
        self.pass_seam()
        return self._writer.failed(error)

    def end(self) -> bytes:
        """See `Writer.end`."""
        return self._writer.end()
