"""A served engine with a chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.conversations.chat_tokenizers import chatml_tokenizer, llama_tokenizer
from lockstep.tests.support.random_models import random_model

if TYPE_CHECKING:
    import httpx

    from lockstep.integration.http.server import BackgroundServer

BLOCK = 16
CONTEXT = 4096
TOKENIZERS = {"chatml": chatml_tokenizer, "llama": llama_tokenizer}


def make_service(kind: str, **settings: object) -> RolloutService:
    """Make a service with a random model that has every token of a tokenizer, and ends at its turn's end."""
    torch.set_num_threads(1)
    tokenizer = TOKENIZERS[kind]()
    model = random_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    config = EngineConfig(**{"kv_cache": "1024 blocks", "block_size": BLOCK, "max_num_seqs": 8, **settings})
    return RolloutService(Engine(model, config, tokenizer=tokenizer))


@dataclass
class Served:
    """A served engine and its client."""

    service: RolloutService
    server: BackgroundServer
    client: httpx.Client

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: object) -> Any:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def open(self, **fields: object) -> str:
        return self.ok("/open_session", **fields)

    def generate(self, id: str, input_ids: list[int], max_new_tokens: int = 8, **fields: object) -> Any:
        """Send token ids as the next turn. `session` are fields of session_params, `params` sampling parameters."""
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **fields.pop("params", {})}  # type: ignore[dict-item]
        session = {"id": id, **fields.pop("session", {})}  # type: ignore[dict-item]
        return self.ok("/generate", input_ids=input_ids, sampling_params=params, session_params=session,
                       return_prompt_token_ids=True, **fields)  # fmt: skip

    def chat(self, id: str | None, messages: list[dict[str, Any]], session: Any = None, **fields: object) -> Any:
        given = {"max_tokens": 8, "seed": 1, "return_token_ids": True, "messages": messages, **fields}
        params = {} if id is None else {"session_params": {"id": id, **(session or {})}}
        return self.ok("/v1/chat/completions", **given, **params)

    def error(self, path: str, status: int, **body: object) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    service = make_service("chatml")
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def serve(service: RolloutService) -> Iterator[Callable[..., Served]]:
    """Return a function that serves the module's engine with these settings."""
    import httpx

    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.http.server import serve_in_background

    opened: list[Served] = []

    def make(**settings: object) -> Served:
        server = serve_in_background(service, HttpConfig(port=0, **settings))
        opened.append(Served(service, server, httpx.Client(base_url=server.url, timeout=60)))
        return opened[-1]

    yield make
    for one in opened:
        one.client.close()
        one.server.close()


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Served:
    return serve()
