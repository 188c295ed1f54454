"""The engine joined to its weights: commits in place, phases, torn weights, memory."""

from __future__ import annotations

import hashlib

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import MemoryReleased, NotIdle, PhaseError, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digest import model_digest
from lockstep.weight_sync.in_place import sync_in_place, write_tensor

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def model(make_model):
    return make_model("qwen2")  # tied embeddings


@pytest.fixture
def service(model):
    return RolloutService(Engine(model, EngineConfig(kv_cache="16 blocks", max_num_seqs=4)))


def test_a_commit_in_place_moves_nothing_and_every_token_knows_it(model, service):
    commit = service.commit_in_place("7", source=model.named_parameters())
    assert (commit.version, commit.bytes_copied) == ("7", 0)
    assert commit.digest == model_digest(model.named_parameters())
    [completion] = service.engine.generate([[1, 2, 3]], PARAMS)
    assert (completion.weight_version, completion.weight_digest) == ("7", commit.digest)
    [span] = completion.weight_versions
    assert (span.version, span.digest, span.start, span.end) == ("7", commit.digest, 0, 4)


def test_one_changed_element_changes_the_digest(model, service):
    before = service.commit_in_place("1", source=model.named_parameters()).digest
    with torch.no_grad():
        model.lm_head.weight[3, 5].add_(1e-3)
    assert service.commit_in_place("2", source=model.named_parameters()).digest != before


def test_a_copy_of_the_weights_is_refused_by_name_and_nothing_is_committed(model, service):
    source = {name: p.detach() for name, p in model.named_parameters()}
    source["model.norm.weight"] = source["model.norm.weight"].clone()
    with pytest.raises(ValueError, match=r"model\.norm\.weight$"):
        service.commit_in_place("2", source=source.items())
    del source["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight$"):
        service.commit_in_place("2", source=source.items())
    assert service.get_weight_version() == "default"
    assert service.engine.epoch == 0


def test_bytes_are_counted_where_they_are_copied():
    resident, incoming = torch.zeros(3, 5), torch.ones(3, 5)
    assert write_tensor(resident, resident.view(3, 5)) == 0
    assert write_tensor(resident, incoming) == 60
    assert torch.equal(resident, incoming)
    with pytest.raises(ValueError, match=r"place: t$"):
        sync_in_place([("t", resident)], [("t", resident.t().clone().t())])


def test_a_digest_asked_for_later_is_there_before_the_next_write(model, service):
    commit = service.commit_in_place("1", source=model.named_parameters(), digest="later")
    expected = model_digest(model.named_parameters())
    assert commit.digest is None and service.engine.weight_digest is None
    with service.optimizer_step():
        assert service.engine.weight_digest == expected
    with pytest.raises(ValueError, match="now"):
        service.commit_in_place("2", source=model.named_parameters(), digest="never")


def test_nothing_is_sampled_between_an_optimizer_step_and_the_next_commit(model, service):
    with pytest.raises(RuntimeError, match="boom"), service.optimizer_step():
        raise RuntimeError("boom")
    with pytest.raises(SamplingRefused, match="commit"):
        service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.state()["num_waiting"] == 0  # the refused request left nothing behind
    service.commit_in_place("1", source=model.named_parameters())
    assert len(service.engine.generate([[1, 2, 3]], PARAMS)) == 1


def test_kv_of_older_weights_is_never_reused(model, service):
    prompt = list(range(1, 40))
    service.engine.generate([prompt], PARAMS)
    assert service.engine.generate([prompt], PARAMS)[0].num_cached_tokens == 32
    assert service.commit_in_place("1", source=model.named_parameters()).num_blocks_dropped == 2
    assert service.engine.generate([prompt], PARAMS)[0].num_cached_tokens == 0


def test_the_rollout_phase_leaves_the_module_as_it_was(model, service):
    model.train()
    model.model.layers[0].eval()
    forwards = {name: "forward" in vars(module) for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    with service.rollout():
        assert not model.training and "forward" in vars(model.lm_head)
    with pytest.raises(KeyError), service.rollout():
        raise KeyError
    assert {name: "forward" in vars(module) for name, module in model.named_modules()} == forwards
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert model.config._attn_implementation == attention
    assert torch.is_grad_enabled() and all(p.requires_grad for p in model.parameters())


def test_the_trainer_owns_the_module_outside_a_phase(service):
    with pytest.raises(PhaseError):
        service.engine.model.forward(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]), None)


def test_memory_is_released_and_comes_back(service):
    freed = service.release_memory_occupation()["kv_cache"]
    assert freed > 0 and service.state()["kv_bytes"] == 0
    assert service.release_memory_occupation(["kv_cache"]) == {"kv_cache": 0}
    with pytest.raises(MemoryReleased):
        service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.resume_memory_occupation() == {"kv_cache": freed}
    assert service.resume_memory_occupation() == {"kv_cache": freed}
    with service.rollout(release_kv=True):
        service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.state()["kv_bytes"] == 0
    with pytest.raises(ValueError, match="cuda_grap"):
        service.release_memory_occupation(["cuda_grap"])


def test_memory_in_use_is_not_released(service):
    service.engine.add([1, 2, 3], PARAMS)
    service.engine.step()
    with pytest.raises(NotIdle, match="1 running"):
        service.release_memory_occupation()


def test_the_digest_is_over_names_and_bytes_of_every_parameter_once(model, service):
    names = [name for name, _ in service.engine.resident_tensors()]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names  # tied to the embedding
    assert len(service.model_digest()) == len(hashlib.sha256().hexdigest())
