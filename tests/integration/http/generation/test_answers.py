"""Tests of whole answers: they are open until the client has read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from lockstep.integration.http.generation.answers import Answer
from lockstep.integration.http.generation.limits import OpenEntries
from lockstep.integration.http.generation.sse import EventStream
from lockstep.rollout.errors import Overloaded

PATIENCE = 30.0
SCOPE = {"type": "http"}


async def receive() -> Message:
    raise AssertionError("an answer reads nothing")


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 18, (1 << 18) + 1, 1 << 19, 1_000_000])
def test_an_answer_is_sent_whole_and_ends_once(num_bytes):
    content, sent, ends = bytes(index % 251 for index in range(num_bytes)), [], []

    async def send(message: Message) -> None:
        assert not ends
        sent.append(message)

    answer = Answer(content, on_end=lambda: ends.append(1))
    asyncio.run(answer(SCOPE, receive, send))
    assert dict(sent[0]["headers"]) == {
        b"content-length": str(num_bytes).encode(),
        b"content-type": b"application/json",
    }
    assert b"".join(message["body"] for message in sent[1:]) == content and ends == [1]
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]


def test_an_answer_that_is_not_read_stays_open_until_its_client_reads_or_goes():
    async def run() -> None:
        may_go_on, ends = asyncio.Event(), []
        is_paused = False

        async def send(message: Message) -> None:  # as uvicorn: it takes one piece, and waits before the next
            nonlocal is_paused
            if is_paused:
                await may_go_on.wait()
            is_paused = len(message.get("body", b"")) > 1 << 16

        reading = asyncio.ensure_future(Answer(b"x" * 300_000, on_end=lambda: ends.append(1))(SCOPE, receive, send))
        leaving = asyncio.ensure_future(Answer(b"x" * 300_000, on_end=lambda: ends.append(2))(SCOPE, receive, send))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ends
        leaving.cancel()
        await asyncio.wait([leaving])
        assert ends == [2]
        may_go_on.set()
        await reading
        assert ends == [2, 1]

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_stream_that_is_not_read_when_the_server_ends_is_cut_off_without_an_error(caplog):
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1"

    async def forever(_: object = None) -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def run() -> None:
        ends = []
        stream = EventStream(events(), on_end=lambda: ends.append(1))
        sending = asyncio.ensure_future(stream(SCOPE, forever, forever))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        await sending
        assert ends == [1]

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert [record.getMessage() for record in caplog.records] == ["a stream is cut off, because the server ends"]


def test_open_entries_are_counted_once_and_a_request_alone_is_let_in():
    entries = OpenEntries(10)
    entries.take("large", 11)
    with pytest.raises(Overloaded, match=r"have 11 log-probabilities, and 1 more .* limit of 10"):
        entries.take("small", 1)
    entries.take("none", 0)
    entries.release("small")
    assert entries.num == 11
    entries.release("large")
    entries.release("large")
    assert entries.num == 0
    entries.take("small", 4)
    entries.take("other", 6)
    assert entries.num == 10
