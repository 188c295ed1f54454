"""The passing of a worker's answer to the client: whole, or event by event."""

from __future__ import annotations

from typing import Any

import httpx

from .budget import Budget
from .moving.progress import Progress, StreamCut, end_of_events
from .relay import Relay


class Passing:
    """The answers that a router keeps until they are complete, within one budget."""

    def __init__(self, max_bytes: int) -> None:
        self._answers = Budget(max_bytes)
        self._newest = Budget(max_bytes // 4)  # events of open streams, by which an abort can end them

    async def whole(self, answer: httpx.Response, relay: Relay) -> None:
        """Forward an answer when it is complete. The answer for which memory is short is passed on as it comes."""
        declared = answer.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else None
        body = bytearray()
        with self._answers.share() as kept:
            async for part in answer.aiter_raw():
                body += part
                if relay.has_begun or not kept.resize(len(body)):
                    await relay.part(answer, bytes(body), num_bytes)
                    body.clear()
                    kept.resize(0)
            if relay.has_begun:
                await relay.end(answer, b"")
            else:
                await relay.whole(answer, bytes(body))

    async def events(self, answer: httpx.Response, relay: Relay, progress: Progress | None) -> None:
        """Forward a stream event by event. The event for which memory is short is passed on as it comes. progress: of
        the stream, if it may go on elsewhere. Raises StreamCut where the worker ends it before its end."""
        rest, num_noted = bytearray(), 0
        with self._answers.share() as kept, self._newest.share() as newest:
            async for part in answer.aiter_raw():
                start = max(0, len(rest) - 2)  # the end of an event may be in two parts
                rest += part
                end = end_of_events(rest, start)
                if end and progress is not None:
                    end = progress.end_of_groups(bytes(rest[:end]))
                if end:
                    await _pass(answer, relay, bytes(rest[:end]), progress)
                    del rest[:end]
                if progress is not None:
                    num_noted = progress.num_bytes
                    if not newest.resize(progress.num_newest_bytes):
                        progress.drop_newest()
                        newest.resize(0)
                if not kept.resize(len(rest) + num_noted):
                    if progress is not None:
                        progress.lose("the router had no memory for its tokens")
                        num_noted = 0
                    if not kept.resize(len(rest)):
                        await relay.part(answer, bytes(rest))
                        rest.clear()
                        kept.resize(0)
            await relay.end(answer, bytes(rest))


async def _pass(answer: httpx.Response, relay: Relay, events: bytes, progress: Progress | None) -> None:
    """Forward whole events. Their notes count as soon as the client's connection has them."""
    if progress is None or not progress.concerns(events):
        await relay.events(answer, events)
        return
    passed: list[tuple[bytes, list[dict[str, Any]]]] = []
    cut = None
    try:
        passed.extend(progress.read(events))
    except StreamCut as error:
        cut = error
    if passed:
        await relay.events(answer, b"".join(event for event, _ in passed))
        for event, notes in passed:
            progress.add(notes, event)
    if cut is not None:
        raise cut
