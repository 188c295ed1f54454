"""A replica's server as verl calls it, over a real socket. Stand-ins take the places of verl and Ray themselves."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from lockstep.tests.support.chat.serving import byte_engine, serving
from lockstep.tests.support.chat.tokenizer import chat_template

SERVER = "lockstep.integration.verl.server"
REPLICA, UTILS = "verl.workers.rollout.replica", "verl.workers.rollout.utils"
CONFIG = SimpleNamespace(full_determinism=False, response_length=64, prompt_length=64, max_model_len=2048)


@pytest.fixture
def server_type(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the class, imported beside the stand-ins."""
    modules = {
        name: ModuleType(name) for name in ("ray", "verl", "verl.workers", "verl.workers.rollout", REPLICA, UTILS)
    }
    named: Any = modules
    named["ray"].util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    named[REPLICA].RolloutMode = SimpleNamespace(HYBRID=1, STANDALONE=2)
    named[REPLICA].TokenOutput = SimpleNamespace
    named[UTILS].get_max_position_embeddings = lambda config: 2048
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = sys.modules.pop(SERVER, None)
    yield import_module(SERVER).LockstepServer
    sys.modules.pop(SERVER)
    if before is not None:
        sys.modules[SERVER] = before


class Late(httpx.AsyncHTTPTransport):
    """Connections on which requests for an answer arrive when a pause has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.has_paused = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate":
            await self.has_paused.wait()
        response = await super().handle_async_request(request)
        if request.url.path == "/pause_generation":
            self.has_paused.set()
        return response


def test_requests_that_arrive_behind_a_pause_end_with_it_where_it_rejects_them(server_type):
    async def ask(url: str) -> list[str]:
        server = server_type(CONFIG, None, None, {})
        server._url, server._client = url, httpx.AsyncClient(transport=Late(), timeout=None)
        asked = [asyncio.create_task(server.generate([1, 2, 3], {}, f"r{number}")) for number in range(4)]
        await asyncio.sleep(0)  # they have begun
        await asyncio.wait_for(server.abort_all_requests(reject_request=True), 60)
        reasons = [one.stop_reason for one in await asyncio.wait_for(asyncio.gather(*asked), 60)]
        later = await server.generate([1, 2, 3], {}, "later")
        await server.resume_generation()
        resumed = await asyncio.wait_for(server.generate([1, 2, 3], {"max_tokens": 2}, "resumed"), 60)
        await server._client.aclose()
        return [*reasons, later.stop_reason, resumed.stop_reason]

    with byte_engine() as engine, serving(engine) as serve:
        assert asyncio.run(ask(serve(chat_template("hermes")))) == ["abort"] * 4 + ["aborted", "length"]
