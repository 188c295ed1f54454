"""A served random model with a tokenizer of bytes, whose answers a grammar can force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.responses import Response
from pydantic import BaseModel

from lockstep.integration.http.chat.grammar import Writer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import BackgroundServer, serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.tokenizer import SPECIAL, VOCAB_SIZE, WORDS, byte_tokenizer, chat_template
from lockstep.tests.support.random_models import random_model

PATIENCE = 60.0
CONTEXT = 4096


def forced(text: str) -> dict[str, Any]:
    """Return the structured_outputs that force a text, whose markers are the tokens that they are in the tokenizer."""
    tokenizer = byte_tokenizer()
    ids = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in (*SPECIAL[1:], *WORDS)}
    format = {"type": "sequence", "elements": Writer(ids).text(text)}
    return {"structural_tag": {"type": "structural_tag", "format": format}}


HIDDEN = ("id", "call_id", "created_at", "item_id", "rid", "parent_rid", "parsed", "parsed_arguments")


def without_ids(value: Any) -> Any:
    """Return a response without its ids, those of its items, its time, its nulls, and what the client parses itself."""
    if isinstance(value, BaseModel):
        return without_ids(value.model_dump(mode="json", warnings=False))
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in HIDDEN and one is not None}
    return value


@dataclass
class Served:
    """A served engine and its clients."""

    service: RolloutService
    server: BackgroundServer

    @cached_property
    def http(self) -> httpx.Client:
        """A client of plain requests."""
        return httpx.Client(base_url=self.server.url, timeout=PATIENCE)

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The openai package's client."""
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def ok(self, input: object = "Weather?", path: str = "/v1/responses", **fields: Any) -> Any:
        """Return a whole answer, which the openai package's model accepts."""
        body = {"input": input, "max_output_tokens": 16, "seed": 3, **fields}
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        Response.model_validate(answer.json(), strict=True)
        return answer.json()

    def chat(self, messages: object, **fields: Any) -> Any:
        """Return the whole answer of a chat."""
        body = {"messages": messages, "max_tokens": 16, "seed": 3, **fields}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def error(self, status: int = 400, **fields: Any) -> dict[str, Any]:
        """Return the error of a request."""
        answer = self.http.post("/v1/responses", json={"input": "Weather?", "max_output_tokens": 4, **fields})
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer(chat_template("hermes", thinks=True))
    model = random_model(
        "qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, eos_token_id=tokenizer.eos_token_id
    )
    service = RolloutService(Engine(model, EngineConfig(kv_cache=1024), tokenizer=tokenizer))
    with service.rollout():
        yield service
        service.engine.stop()


@pytest.fixture(scope="module")
def serve(service: RolloutService) -> Iterator[Callable[..., Served]]:
    """Return a function that serves the engine with these settings."""
    found: dict[tuple[tuple[str, object], ...], Served] = {}

    def make(**settings: Any) -> Served:
        key = tuple(sorted(settings.items()))
        if key not in found:
            server = serve_in_background(service, HttpConfig(port=0, model_name="small", **settings))
            found[key] = Served(service, server)
        return found[key]

    yield make
    for one in found.values():
        one.http.close()
        one.openai.close()
        one.server.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
