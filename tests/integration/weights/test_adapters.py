"""Commits of a model with adapters: the digest covers base, adapter and state, and hashes a frozen base once."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lockstep.integration.service import RolloutService
from lockstep.integration.weights import rank_weights
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


@pytest.fixture
def trained(make_model):
    torch.manual_seed(0)
    model = get_peft_model(make_model("qwen3"), LoraConfig(**LORA))
    service = RolloutService(Engine(model, EngineConfig(kv_cache="16 blocks")))
    yield model, service
    service.close()


@pytest.fixture
def hashed(monkeypatch):
    """Return a list to which the names of hashed tensors are added."""
    names: list[str] = []
    real = rank_weights.tensor_roots

    def tensor_roots(pairs):
        pairs = list(pairs)
        names.extend(name for name, _ in pairs)
        return real(pairs)

    monkeypatch.setattr(rank_weights, "tensor_roots", tensor_roots)
    return names


def parts_of(model, kind):
    return [parameter for name, parameter in model.named_parameters() if ("lora_" in name) == (kind == "adapter")]


def add(model, kind, value=0.1):
    with torch.no_grad():
        parts_of(model, kind)[0].add_(value)


def test_digest_covers_base_adapter_and_state(trained):
    model, service = trained
    commits = 0

    def digest():
        nonlocal commits
        commits += 1
        commit = service.commit_in_place(str(commits), source=model.named_parameters())
        assert commit.bytes_copied == 0 and commit.digest == service.model_digest()
        return commit.digest

    first = digest()
    add(model, "adapter")
    with_adapter = digest()
    add(model, "base")
    with_base = digest()
    with model.disable_adapter():
        off = digest()
    model.merge_adapter()
    merged = digest()
    assert len({first, with_adapter, with_base, off, merged}) == 5
    with pytest.raises(ValueError, match=r"not the trainer's own storage.*q_proj\.lora_A\.default\.weight"):
        service.commit_in_place("x", source=[(n, p.clone()) for n, p in model.named_parameters()])


def test_frozen_base_is_hashed_once(trained, hashed):
    model, service = trained
    service.commit_in_place("1", source=model.named_parameters())
    assert len(hashed) == len(list(model.parameters()))
    hashed.clear()
    with service.optimizer_step():
        add(model, "adapter")
    first = service.commit_in_place("2", source=model.named_parameters()).digest
    assert len(hashed) == len(parts_of(model, "adapter"))
    assert first == service.model_digest()  # this verb computes everything
    hashed.clear()
    add(model, "base")  # seen by the tensor's version counter
    second = service.commit_in_place("3", source=model.named_parameters()).digest
    assert len(hashed) == len(parts_of(model, "adapter")) + 1 and second == service.model_digest()
    frozen = parts_of(model, "base")[0].data
    frozen.mul_(1.1)  # not counted by torch, but seen by the sample
    third = service.commit_in_place("4", source=model.named_parameters()).digest
    frozen.view(-1)[1] += 1  # between the elements of the sample, so it is to be announced
    service.weights_restored()
    fourth = service.commit_in_place("5", source=model.named_parameters()).digest
    assert fourth == service.model_digest() and len({first, second, third, fourth}) == 4


def test_a_parameter_that_was_trained_and_frozen_again_is_hashed_anew(trained):
    model, service = trained
    weight = parts_of(model, "base")[0]
    service.commit_in_place("1", source=model.named_parameters())
    weight.requires_grad_(True)
    with service.optimizer_step():
        weight.data.view(-1)[1] += 1  # a write that torch does not count
    service.commit_in_place("2", source=model.named_parameters())
    weight.requires_grad_(False)
    assert service.commit_in_place("3", source=model.named_parameters()).digest == service.model_digest()


def test_digest_of_a_switched_state_is_told_only_where_it_was_computed(trained):
    model, service = trained
    service.commit_in_place("1", source=model.named_parameters())
    params = {"max_new_tokens": 1}
    digest = service.engine.weight_digest
    [on] = service.engine.generate([1, 2, 3], params)
    with model.disable_adapter():
        [off] = service.engine.generate([1, 2, 3], params)
    [again] = service.engine.generate([1, 2, 3], params)
    assert [c.weight_digest for c in (on, off, again)] == [digest, None, digest]
    assert [c.weight_version for c in (on, off, again)] == ["1", "1", "1"]
