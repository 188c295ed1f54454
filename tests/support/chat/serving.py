"""Servers of a small model that answers what a grammar forces, one for each way to set them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.integration.http.chat.grammar import Writer
from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.tokenizer import SPECIAL, VOCAB_SIZE, WORDS, byte_tokenizer
from lockstep.tests.support.random_models import random_model

MODEL = "small"
Serve = Callable[..., str]  # (template, **settings of the server): returns its address


@contextmanager
def byte_engine(context: int = 2048) -> Iterator[Engine]:
    """Yield an engine of a random model with a tokenizer of bytes. context: tokens."""
    tokenizer = byte_tokenizer()
    model = random_model(
        "qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=context, eos_token_id=tokenizer.eos_token_id
    )
    engine = Engine(model, EngineConfig(kv_cache=512), tokenizer=tokenizer)
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def serving(engine: Engine) -> Iterator[Serve]:
    """Yield a function that returns the address of a server with these settings, whose template all servers share."""
    service, servers = RolloutService(engine), {}

    def serve(template: str, **settings) -> str:
        assert engine.tokenizer is not None
        engine.tokenizer.chat_template = template
        key = tuple(settings.items())
        if key not in servers:
            servers[key] = serve_in_background(service, HttpConfig(port=0, model_name=MODEL, **settings))
        return servers[key].url

    with service.rollout():
        yield serve
        for server in servers.values():
            server.close()


def forced(text: str) -> dict[str, object]:
    """Return the response_format that forces a text, whose markers are the tokens that they are in the tokenizer."""
    tokenizer = byte_tokenizer()
    ids = {marker: tokenizer.convert_tokens_to_ids(marker) for marker in (*SPECIAL[1:], *WORDS)}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": Writer(ids).text(text)}}
