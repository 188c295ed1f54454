"""A trainer that ties or unties its embeddings after the engine was made: digests name the weights that there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.weight_sync.digests.model_digest import model_digest


@pytest.fixture
def trained(make_model):
    model = make_model("qwen3", tie_word_embeddings=True)
    service = RolloutService(Engine(model, EngineConfig(kv_cache="16 blocks")))
    yield model, service
    service.close()


def commit(service: RolloutService, model: nn.Module, version: str) -> str:
    """Commit the module's weights, and return the digest, which is that of its parameters."""
    service.commit_in_place(version, source=model.named_parameters())
    digest = service.engine.weight_digest
    assert digest == model_digest((name, tensor.detach()) for name, tensor in model.named_parameters())
    return digest


def test_an_untied_head_is_in_every_digest(trained):
    model, service = trained
    digests = [commit(service, model, "tied")]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for version in ("untied", "one step on", "two steps on"):
        digests.append(commit(service, model, version))
        with torch.no_grad():
            model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight))
    assert len(set(digests)) == 4
    assert service.get_weights_by_name("lm_head.weight", 4) == model.lm_head.weight.detach()[:4, :4].tolist()


def test_an_update_writes_an_untied_head_and_a_tied_one_again(trained):
    model, service = trained
    embedding = model.model.embed_tokens
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    new = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    service.update_weights_from_named_tensors(new.items(), weight_version="1")
    service.commit_implicit_update()
    assert all(torch.equal(tensor, new[name]) for name, tensor in model.named_parameters())
    model.lm_head.weight = embedding.weight
    assert commit(service, model, "tied again")
