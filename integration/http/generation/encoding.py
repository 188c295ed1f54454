"""Encoding of answers: short ones on the event loop, whose time they share, and long ones in a thread."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence

from ....rollout.completion import Completion, StreamChunk
from ..edge.json_slices import encode_in_slices
from ..edge.threads import run_giving_way, start_pool

QUICK_COST = 500  # an answer or event that costs more is made in the thread
_TURN_S = 0.005  # of each pass of the event loop, all answers and events together take about so long
_SEND_S = 50e-6  # what sending one takes, about
_TEXT_COST = 10  # of a log-probability with its token's text, in log-probabilities without it
_ANSWER_COST = 20  # of each sequence, beside its log-probabilities
_BYTES_PER_COST = 512  # that are copied as fast as one log-probability is encoded
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)  # as JSONResponse encodes


class Encoder:
    """Maker of answers and events for one event loop, so that other requests are never kept waiting for them.

    What costs up to `QUICK_COST` is made on the event loop while the pass has time left, else in a later pass, in the
    order of asking. Everything else is made in one thread, one after the other.
    """

    def __init__(self) -> None:
        self._thread = start_pool(1, "lockstep-answers")
        self._waiting: deque[tuple[Callable[[], bytes], asyncio.Future[bytes]]] = deque()
        self._left_s = _TURN_S
        self._will_renew = False

    async def run(self, make: Callable[[], bytes], cost: int) -> bytes:
        """Return `make()`. cost: in entries, as the functions of this module count them. Raises its errors."""
        if cost > QUICK_COST:
            return await self._in_thread(make)
        if self._left_s > 0 and not self._waiting:
            return self._timed(make)
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((make, done))
        self._renew_soon()
        return await done

    async def _in_thread(self, make: Callable[[], bytes]) -> bytes:
        jobs = [make]  # emptied where the client leaves: the thread's queue must not keep what belongs to the job
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, run_giving_way, loop, lambda: jobs.pop()())
        except asyncio.CancelledError:
            jobs.clear()
            raise

    def _timed(self, make: Callable[[], bytes]) -> bytes:
        self._renew_soon()
        began = time.monotonic()
        try:
            return make()
        finally:
            self._left_s -= time.monotonic() - began + _SEND_S

    def _renew_soon(self) -> None:
        if not self._will_renew:
            self._will_renew = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begin the next pass of the event loop."""
        self._will_renew = False
        self._left_s = _TURN_S
        while self._waiting and self._left_s > 0:
            make, done = self._waiting.popleft()
            if done.done():  # its client has left
                continue
            try:
                done.set_result(self._timed(make))
            except Exception as error:  # noqa: BLE001 - the request that waits for it gets the error
                done.set_exception(error)


def encode(value: object) -> bytes:
    """Encode a plain value as JSON in UTF-8, in pieces between which other threads run; half of a surrogate pair, which
    UTF-8 does not have, as an escape. A list is emptied meanwhile: letting go of millions of entries at once would hold
    all threads."""
    if not isinstance(value, list):
        return _encoded(value)
    value.reverse()
    parts = []
    while value:
        parts.append(_encoded(value.pop()))
    return b"[%b]" % b",".join(parts)


def _encoded(value: object) -> bytes:
    # Python's escape of such a character is JSON's, and only texts have it.
    return "".join(encode_in_slices(value, _ENCODER.encode)).encode("utf-8", "backslashreplace")


# -- costs: each is found in a time that does not depend on the number of positions --------------------------------


def completion_cost(c: Completion, *, has_texts: bool) -> int:
    """Count the log-probabilities and other parts of an answer. has_texts: tokens come with their texts."""
    lists = (c.top_logprobs, c.listed_logprobs, c.prompt_top_logprobs, c.prompt_listed_logprobs)
    num = sum(map(_num_alternatives, lists)) + len(c.logprobs) + len(c.prompt_logprobs or ())
    num_ids = len(c.prompt_ids) + len(c.token_ids) + len(c.text) + (len(c.kept_ids.ids) if c.kept_ids else 0)
    return num * (_TEXT_COST if has_texts else 1) + num_ids // 16 + _ANSWER_COST


def chunk_cost(chunk: StreamChunk, *, has_texts: bool) -> int:
    """Count the log-probabilities of a step's output, likewise."""
    num = len(chunk.logprobs) + _num_alternatives(chunk.top_logprobs) + _num_alternatives(chunk.listed_logprobs)
    return num * (_TEXT_COST if has_texts else 1)


def copy_cost(num_bytes: int) -> int:
    """Return the cost of bytes that are only copied."""
    return num_bytes // _BYTES_PER_COST


def _num_alternatives(positions: Sequence[Sequence[object] | None] | None) -> int:
    """Count alternatives: all positions have as many, but for a prompt's first, which has none."""
    return len(positions) * len(positions[-1] or ()) if positions else 0
