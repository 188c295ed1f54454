"""Tests of where bodies are parsed and checked."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from lockstep.integration.http.edge.bodies import Body, arrived, fields_of, parsed, read_as
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.edge.errors import BadField, HttpError

PATIENCE = 30.0


@pytest.mark.parametrize(
    ("body", "is_on_loop"),
    [
        ({"text": "1 + 2", "sampling_params": {"max_new_tokens": 5}}, True),
        ({"text": "1" * 4000}, True),
        ({"text": "1" * 5000}, False),
        ({"input_ids": [[1]] * 200, "sampling_params": [{"top_k": 1}] * 100}, False),
        ({"text": "1" * 100_000}, False),
        ({"text": "1" * 2_000_000}, False),
    ],
    ids=["small", "text", "longer", "many settings", "medium", "long"],
)
def test_the_event_loop_checks_only_bodies_that_are_small_and_have_few_parts(body, is_on_loop):
    data = json.dumps(body).encode()

    def check(values: dict[str, object]) -> bool:
        assert values == body
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(parsed(data, 1 << 18, check)) is is_on_loop


class Settings(Body):
    """Fields of numbers, of truth values, and of both."""

    count: int | None = None
    share: float | list[float] = 1.0
    flag: bool = False
    kind: bool | int = 0


def test_a_truth_value_is_no_number():
    for field in ("count", "share"):
        for value in (True, False):
            with pytest.raises(BadField, match=f"{field}: must be a number, not {str(value).lower()}"):
                fields_of(Settings, {field: value})
    assert fields_of(Settings, {"flag": True, "kind": True}) == Settings(flag=True, kind=True)
    assert fields_of(Settings, {"count": 1, "share": "0.5"}) == Settings(count=1, share=0.5)


class Client:
    """A client that sends a body, and leaves when it is told to."""

    def __init__(self, data: bytes, app: Starlette) -> None:
        self.leaves = asyncio.Event()
        self._data: bytes | None = data
        self.request = Request({"type": "http", "method": "POST", "headers": [], "app": app}, self._receive)

    async def _receive(self) -> dict[str, object]:
        if (data := self._data) is not None:
            self._data = None
            return {"type": "http.request", "body": data, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("num_bytes", [5000, 2_000_000], ids=["medium", "long"])
def test_a_body_that_waits_for_a_thread_is_not_read_when_its_client_has_left(num_bytes):
    """Clients that send costly bodies and leave would keep everybody's bodies waiting behind theirs."""
    data, read = json.dumps({"text": "1" * num_bytes}).encode(), []
    is_busy, may_go_on = threading.Event(), threading.Event()

    def slowly(values: dict[str, object]) -> str:
        is_busy.set()
        assert may_go_on.wait(PATIENCE)
        return "the first"

    async def crowd() -> None:
        app = Starlette()
        app.state.config = HttpConfig()
        first = asyncio.ensure_future(read_as(Client(data, app).request, slowly))
        await asyncio.to_thread(is_busy.wait, PATIENCE)
        clients = [Client(data, app) for _ in range(5)]
        waiting = [asyncio.ensure_future(read_as(one.request, read.append, ends_with_client=True)) for one in clients]
        for client in clients[:-1]:
            client.leaves.set()
        for one in waiting[:-1]:
            with pytest.raises(HttpError, match="the client left"):
                await one
        assert app.state.open_bodies.num_bytes == 2 * len(data)
        may_go_on.set()
        assert await first == "the first"
        await waiting[-1]
        assert len(read) == 1 and app.state.open_bodies.num_bytes == 0

    asyncio.run(asyncio.wait_for(crowd(), PATIENCE))


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity"])
def test_a_compressed_body_is_a_415_that_names_its_encoding(encoding):
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"\x1f\x8b", "more_body": False}

    application = Starlette()
    application.state.config = HttpConfig()
    headers = [(b"content-encoding", encoding.encode())]
    request = Request({"type": "http", "app": application, "headers": headers}, receive)

    async def read() -> bytes:
        async with arrived(request, 100) as data:
            return data

    with pytest.raises(HttpError, match=f"Content-Encoding: '{encoding}' is not supported") as found:
        asyncio.run(read())
    assert found.value.status == 415


def test_times_of_an_end_are_finite_and_an_address_may_stand_in_brackets():
    with pytest.raises(ValueError, match="drain_timeout_s must be positive, not nan; idle_timeout_s must be finite"):
        HttpConfig(idle_timeout_s=float("inf"), drain_timeout_s=float("nan"))
    assert HttpConfig(session_idle_s=float("inf")).session_idle_s == float("inf"), "sessions may live for ever"
    config = HttpConfig(host="[::1]")
    assert config.host == "::1" and config.is_loopback
