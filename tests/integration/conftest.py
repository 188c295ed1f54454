"""Fixtures of served engines. They import packages when they are used: many tests here need no model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lockstep.integration.service import RolloutService


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> None:
    """Let all HTTP clients of this process share one store of certificates: reading it takes longer than most tests."""
    if "httpx" in sys.modules:
        from httpx._transports import default

        default.create_ssl_context = functools.cache(default.create_ssl_context)


@pytest.fixture
def service(model: PreTrainedModel, tmp_path: Path) -> Iterator[RolloutService]:
    """Yield a service whose engine has read `model` from a folder."""
    from lockstep.integration.service import RolloutService
    from lockstep.rollout.config import EngineConfig
    from lockstep.rollout.engine import Engine

    model.save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def server(service):
    """Serve the test's service over HTTP, without keys."""
    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.http.server import serve_in_background

    with serve_in_background(service, HttpConfig(port=0)) as server:
        yield server


@pytest.fixture
def client(server):
    """Yield an HTTP client of the server."""
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
