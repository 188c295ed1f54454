"""Servers of the Tinker API over tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.tinker.serving.server import TinkerServer
from lockstep.integration.tinker.training.config import TinkerConfig
from lockstep.rollout.config import EngineConfig
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.tinker_client import Client


@contextmanager
def serving(
    folder: Path,
    dtype: str = "float32",
    http: HttpConfig | None = None,
    overlap: bool | None = None,
    **settings: object,
) -> Iterator[TinkerServer]:
    """Serve the model in `folder / "model"`. settings: of TinkerConfig."""
    config = TinkerConfig("tiny", folder / "checkpoints", **{"poll_s": 0.5, **settings})
    engine = EngineConfig(kv_cache="64 blocks", max_num_seqs=8, dtype=dtype, overlap=overlap)
    server = TinkerServer(folder / "model", config, engine, http or HttpConfig(port=0))
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a tiny model."""
    path = tmp_path_factory.mktemp("tinker")
    random_model("qwen3").save_pretrained(path / "model")
    return path


@pytest.fixture
def serve(folder) -> Callable:
    """Return `serving` with the tiny model."""
    return lambda *args, **settings: serving(folder, *args, **settings)


@pytest.fixture(scope="module")
def server(folder) -> Iterator[TinkerServer]:
    with serving(folder) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client
