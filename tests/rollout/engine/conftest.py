"""Engines of the tests beside this file. They have one thread."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.engine.callers import WORDS


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)  # these matrices are small: a second thread would only wait for the first


@pytest.fixture
def make_engine(make_model):
    def make(family: str = "qwen3", *, tokenizer=None, model: dict | None = None, **config: object) -> Engine:
        # Without drafts: these tests count steps and chunks, and a prompt that comes again would need fewer of them.
        settings = {"kv_cache": "64 blocks", "max_num_seqs": 8, "max_num_batched_tokens": 256, "speculation": "off"}
        module = make_model(family, **(model or {}))
        return Engine(module.train(), EngineConfig(**{**settings, **config}), tokenizer=tokenizer)

    return make


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=90, special_tokens=["<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<eos>")


@pytest.fixture
def talker(make_engine, tokenizer) -> Engine:
    """Make an engine with a tokenizer."""
    return make_engine(tokenizer=tokenizer, model={"vocab_size": len(tokenizer)})
