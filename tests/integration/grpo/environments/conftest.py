"""The service whose model plays the episodes of these tests."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.chat.tokenizer import VOCAB_SIZE, byte_tokenizer, chat_template


@pytest.fixture
def service(make_model, restore_threads):
    torch.set_num_threads(1)
    engine = Engine(
        make_model("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=512),
        EngineConfig(kv_cache="128 blocks", max_num_seqs=8), tokenizer=byte_tokenizer(chat_template("hermes")),
    )  # fmt: skip
    service = RolloutService(engine)
    service.commit_in_place("0", source=engine.model.trained_module.named_parameters())
    yield service
    engine.close()
