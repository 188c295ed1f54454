"""Tests of turns: however many requests with bodies arrive at once, a pass of the event loop begins a few of them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from lockstep.integration.http.app import create_app
from lockstep.integration.http.edge.turns import NUM_A_PASS, Turns, TurnsMiddleware
from lockstep.integration.http.generation import generate

NUM_ARRIVALS = 50


async def arrive(app, method: str, path: str = "/generate") -> None:
    """Send a request without the sockets of a server."""
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-length", b"13")], "app": app, "state": {}}  # fmt: skip
    body = iter([{"type": "http.request", "body": b'{"text": "a"}'}])

    async def receive():
        return next(body, {"type": "http.disconnect"})

    async def send(message):
        pass

    await app(scope, receive, send)


class Passes:
    """Count the passes of the running event loop."""

    def __init__(self) -> None:
        self.num = 0
        self._count()

    def _count(self) -> None:
        self.num += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def end(self) -> None:
        self._next.cancel()


def test_of_many_bodies_that_arrive_at_once_a_pass_of_the_loop_reads_a_few(service, monkeypatch):
    """All were read and checked in one pass, and a report, which needs several, waited for each of them."""
    app, num_read = create_app(service), Counter()

    async def storm() -> None:
        passes = Passes()
        whole = generate.read_generate

        def counted(*args, **options):
            num_read[passes.num] += 1
            return whole({}, *args[1:], **options)  # refused: nothing is asked of the engine

        monkeypatch.setattr(generate, "read_generate", counted)
        await asyncio.gather(*(arrive(app, "POST") for _ in range(NUM_ARRIVALS)))
        passes.end()

    asyncio.run(storm())
    assert num_read.total() == NUM_ARRIVALS
    assert max(num_read.values()) <= NUM_A_PASS


def test_a_request_alone_begins_in_the_pass_in_which_it_arrives():
    async def alone() -> int:
        passes, turns = Passes(), Turns(4)
        before = passes.num
        await turns.take()
        passes.end()
        return passes.num - before

    assert asyncio.run(alone()) == 0


def test_turns_are_taken_in_the_order_of_asking_and_a_cancelled_one_is_left_out():
    async def ask_all() -> list[int]:
        turns, order = Turns(2), []

        async def one(index: int) -> None:
            await turns.take()
            order.append(index)

        tasks = [asyncio.ensure_future(one(index)) for index in range(9)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(ask_all()) == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_report_does_not_wait_behind_requests_with_bodies(method):
    begun = []

    async def inner(scope, receive, send) -> None:
        begun.append(scope["method"])

    async def storm() -> None:
        app = TurnsMiddleware(inner)
        await asyncio.gather(*(arrive(app, "POST") for _ in range(NUM_ARRIVALS)), arrive(app, method))

    asyncio.run(storm())
    assert begun.index(method) == NUM_A_PASS
