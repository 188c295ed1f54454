"""Engines of the tests beside this file. They have one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

VOCAB = 1024


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def small(make_model) -> Callable[..., PreTrainedModel]:
    """Return a function of family and dtype: a model of a vocabulary that holds the tokens of `bpe_tokenizer`."""

    def make(family: str = "qwen3", dtype: torch.dtype = torch.float32, **options: object) -> PreTrainedModel:
        return make_model(family, dtype=dtype, vocab_size=VOCAB, eos_token_id=0, **options).train()

    return make


@pytest.fixture
def make_engine(small, bpe_tokenizer, in_stages) -> Callable[..., Engine]:
    """Return a function of a model, or a family, and settings; stages: of the pipeline."""

    def make(model: PreTrainedModel | str = "qwen3", stages: int = 1, **config: object) -> Engine:
        settings = {"kv_cache": "128 blocks", "max_num_seqs": 12, "max_num_batched_tokens": 256, **config}
        module = small(model) if isinstance(model, str) else model
        return Engine(module, EngineConfig(**settings), tokenizer=bpe_tokenizer, make_runner=in_stages(stages))

    return make
