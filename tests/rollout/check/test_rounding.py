"""Modules that the check must not refuse: their own forward rounds as much, or chooses by what is rounding."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from lockstep.rollout.check import module_check
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support.random_models import spread_weights

COMMON = {
    "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _anew(restore_threads, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "0")
    monkeypatch.setattr(module_check, "_known", {})


def made(kind: str, seed: int, factor: float = 1.0, **settings: object) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **settings})
    torch.manual_seed(seed)
    model = spread_weights(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter *= factor
    return model


def test_a_module_that_rounds_much_itself_is_hosted_and_one_that_does_not_is_measured_by_that(caplog):
    small = {"hidden_size": 48, "intermediate_size": 7, "num_attention_heads": 6, "hidden_act": "mish"}
    refusals = []
    with caplog.at_level(logging.INFO, logger=module_check.__name__):
        for seed in range(6):
            module_check._known.clear()  # modules of one configuration are checked once
            try:
                Engine(made("Llama", seed, 5.0, num_hidden_layers=4, **small), EngineConfig(kv_cache="16 blocks"))
            except ValueError as error:
                refusals.append(str(error))
    assert "LlamaForCausalLM rounds by" in caplog.text
    assert len(refusals) <= 2 and all("of which rounding explains 0.25" in why for why in refusals)


@pytest.mark.parametrize("seed", [2, 13])
def test_an_expert_that_is_chosen_by_a_largest_score_is_held(seed):
    """A mixer of Phi-3.5-MoE chooses by `max`, not by topk."""
    settings = {"intermediate_size": 96, "num_hidden_layers": 4, "num_local_experts": 16, "router_jitter_noise": 0.0}
    Engine(made("Phimoe", seed, **settings), EngineConfig(kv_cache="16 blocks"))


def test_experts_whose_own_products_need_other_widths_are_compared_by_their_code():
    settings = {"intermediate_size": 100, "num_hidden_layers": 2, "num_local_experts": 4}
    model = made("Mixtral", 0, **settings)
    Engine(model, EngineConfig(kv_cache="16 blocks"))
    assert model.config._experts_implementation != "eager"


@pytest.mark.parametrize("window", [511, 512, 600, 1220, 1221])
def test_a_window_of_at_least_the_context_is_none(window):
    Engine(
        made("Mistral", 0, sliding_window=window, intermediate_size=96, num_hidden_layers=2),
        EngineConfig(kv_cache="4 blocks"),
    )
