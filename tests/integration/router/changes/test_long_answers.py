"""Long answers of workers to administration are parsed, merged and passed on while other requests go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lockstep.integration.router.calls import WorkerCall
from lockstep.integration.router.changes.broadcast import Result, broadcast, common, encoded, summarise
from lockstep.integration.router.fleet.worker import Worker
from lockstep.integration.router.wire import Answer

NODES = [{"id": number, "tokens": list(range(number, number + 20))} for number in range(20_000)]
VALUES = {
    "objects": {"nodes": NODES, "device": "cpu"},
    "numbers": [[[0.1 * column for column in range(1000)] for _ in range(300)]],
    "texts": {"nodes": ["ä" * 100] * 50_000},
}
NUM = 3


class LongWire:
    """A wire to workers whose answers are all the same."""

    def __init__(self, value: object) -> None:
        self.data = json.dumps(value).encode()

    async def fetch(self, url: str, call: WorkerCall, max_bytes: int, limit_s: float) -> Answer:
        return Answer(200, self.data)


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often a thread has let it go first, or has told it of a result."""

    num_calls = 0

    def call_soon_threadsafe(self, *given: Any, **more: Any) -> asyncio.Handle:
        self.num_calls += 1
        return super().call_soon_threadsafe(*given, **more)


@pytest.mark.parametrize("kind", VALUES)
def test_the_event_loop_goes_on_while_long_answers_are_parsed_and_merged(kind):
    value, loop = VALUES[kind], CountingLoop()
    wire, workers = LongWire(value), [Worker(f"http://w:{number}", str(number)) for number in range(NUM)]

    async def ask() -> tuple[int, bytes]:
        results = await broadcast(wire, workers, WorkerCall("GET", "/a", "", (), b""), 60.0, 1 << 30)  # type: ignore[arg-type]
        assert loop.num_calls > 20 * NUM, "they are parsed at once"
        loop.num_calls = 0
        return await encoded(results, summarise)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        status, body = runner.run(ask())
    assert loop.num_calls > 20, "they are merged at once"
    told = json.loads(body)
    assert status == 200 and [one["body"] for one in told["results"]] == [value] * NUM
    assert isinstance(value, list) or told["nodes"] == value["nodes"]


def test_long_lists_are_compared_whole():
    rows = [list(range(100)) for _ in range(1000)]
    other = [*rows[:-1], [*range(99), 0]]
    assert common([rows, [list(row) for row in rows]]) == rows and common([[rows], [list(rows)]]) == [rows]
    assert common([rows, other]) is None and common([[rows], [other]]) is None and common([rows, rows[1:]]) is None
    assert common([[1], [1.0]]) == [1] and common([1, 1.0]) is None


def test_a_list_of_a_worker_is_no_message():
    status, body = summarise([Result(Worker("http://w:1", "a"), 200, [[0.5] * 9])])
    assert status == 200 and body["message"] == ""
