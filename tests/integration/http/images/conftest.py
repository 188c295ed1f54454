"""Served engines of models of images and text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.http.server import serve_in_background
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.http.images.served import Served
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.bpe_tokenizer import train_tokenizer


@pytest.fixture(scope="module", params=["qwen3_vl", "llava", "gemma3", "internvl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lockstep.tests.integration.http.images.folders import make_folder

    needs_transformers(5, 23)
    return make_folder(request.param, train_tokenizer(), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """Serve the folder's model."""
    torch.set_num_threads(1)
    service = RolloutService(Engine(folder, EngineConfig(kv_cache="256 blocks", max_num_seqs=8)))
    with serve_in_background(service, HttpConfig(port=0, model_name="tiny")) as server, Served(server) as served:
        yield served
    service.close()
