"""Adapter folders that PEFT makes in other ways: each is loaded and taken out whole, or refused with no trace."""

from __future__ import annotations

import json
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.adapters.folder import AdapterFolder
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.weights.sessions.callers import interrupt
from lockstep.tests.optional_packages import needs_peft_of_transformers
from lockstep.tests.support.callers import soon, submit
from lockstep.tests.support.forked_ranks import run_ranks
from lockstep.weight_sync.errors import SessionBusy, SessionError

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)


@pytest.fixture
def served(make_model, tmp_path):
    """Yield a function that serves a model of a family from its folder, and returns the service."""
    services = []

    def serve(family: str) -> RolloutService:
        make_model(family).save_pretrained(tmp_path / family)
        services.append(RolloutService(Engine(tmp_path / family, EngineConfig(kv_cache="32 blocks"))))
        return services[-1]

    yield serve
    for service in services:
        service.close()


def saved_adapter(model, folder, **settings):
    """Write an adapter with values of its own, and return its folder."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(folder)
    return folder


def logprobs(service):
    return service.engine.generate([[3, 17, 90]], GREEDY)[0].logprobs


@pytest.mark.parametrize("command", ["hold", "replace_adapter", "commit_weights"])
def test_an_interrupted_load_is_whole_or_none_and_stops_nothing(served, make_model, tmp_path, command):
    service = served("qwen3")
    folder = saved_adapter(make_model("qwen3"), tmp_path / "adapter", target_modules=["q_proj"])
    before = logprobs(service)
    interrupt(service, command, lambda: service.load_lora_adapter("a", folder, weight_version="1"))
    is_loaded = command != "hold"  # else the interrupt waits for the commit
    assert bool(service.loaded_adapters) is is_loaded and service.engine.refusal is None
    assert (service.engine.weight_version == "1") is is_loaded and (logprobs(service) != before) is is_loaded
    assert service.engine.weight_digest in (None, service.model_digest())
    if not is_loaded:
        service.load_lora_adapter("a", folder, weight_version="1")
    service.unload_lora_adapter("a", weight_version="2")
    assert logprobs(service) == before and service.loaded_adapters == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    ],
)
def test_an_adapter_that_would_change_the_base_is_refused_with_no_trace(served, make_model, tmp_path, settings, named):
    service = served("llama")
    before, digest = logprobs(service), service.model_digest()
    folder = saved_adapter(make_model("llama"), tmp_path / "adapter", target_modules=["q_proj"], **settings)
    with pytest.raises(ValueError, match=named):
        service.load_lora_adapter("a", str(folder))
    assert logprobs(service) == before and service.model_digest() == digest


def test_an_adapter_of_two_parameters_of_one_layer_is_loaded_and_taken_out(served, make_model, tmp_path):
    needs_peft_of_transformers()
    service = served("qwen3_moe")
    before = logprobs(service)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder = saved_adapter(
        make_model("qwen3_moe"), tmp_path / "adapter", target_modules=["q_proj"], target_parameters=parameters
    )
    with_adapter = []
    for _ in range(2):
        service.load_lora_adapter("a", str(folder))
        with_adapter.append(logprobs(service))
        service.unload_lora_adapter("a")
        assert logprobs(service) == before
    assert with_adapter[0] == with_adapter[1] != before


@pytest.mark.parametrize("beginning", [True, "Gaussian", "orthogonal"])
def test_a_load_leaves_the_base_and_the_random_generator_as_they_were(served, make_model, tmp_path, beginning):
    service = served("llama")
    whole = logprobs(service)
    folder = saved_adapter(
        make_model("llama"), tmp_path / "adapter", target_modules=["q_proj"], init_lora_weights=beginning
    )
    before = torch.random.get_rng_state()
    service.load_lora_adapter("a", str(folder))
    assert torch.equal(torch.random.get_rng_state(), before) and logprobs(service) != whole
    service.unload_lora_adapter("a")
    assert logprobs(service) == whole


def test_a_refused_folder_says_what_it_lacks(served, make_model, tmp_path):
    service = served("llama")
    folder = saved_adapter(make_model("llama"), tmp_path / "adapter", target_modules=["q_proj"])
    before, file = logprobs(service), folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ValueError, match="is missing"):
        service.load_lora_adapter("a", str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": ["pissa"]}))
    with pytest.raises(ValueError, match="init_lora_weights"):
        service.load_lora_adapter("a", str(folder))
    assert logprobs(service) == before


def test_no_update_begins_while_an_adapter_is_changed(served, make_model, tmp_path):
    service = served("llama")
    before, digest = logprobs(service), service.model_digest()
    folder = saved_adapter(make_model("llama"), tmp_path / "adapter", target_modules=["q_proj"])
    service.update_weights_from_named_tensors(list(service.engine.weights.resident_tensors()), weight_version="1")
    service.commit_implicit_update()
    replace, refused = service.engine.weights.replace_adapter, []

    def begin() -> None:
        with pytest.raises(SessionBusy, match="an adapter is changed"):
            service.begin_weight_update(coverage="partial", lease_s=0.01)
        refused.append(True)

    def replace_while_another_begins(content: object) -> object:
        former = replace(content)
        soon(submit(begin))
        return former

    service.engine.weights.replace_adapter = replace_while_another_begins
    (folder / "adapter_model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        service.load_lora_adapter("a", str(folder))
    (tmp_path / "kept").rename(folder / "adapter_model.safetensors")
    assert service.revert_weight_update() == "default"  # a load that failed leaves the undo data
    assert service.load_lora_adapter("a", str(folder)).commit.digest == service.model_digest() != digest
    service.unload_lora_adapter("a")
    assert refused == [True, True] and logprobs(service) == before and service.model_digest() == digest
    with pytest.raises(SessionError, match="no commit"):
        service.revert_weight_update()


def test_an_adapter_folder_that_is_written_anew_is_no_part_of_the_one_that_was_read(make_model, tmp_path):
    folder = saved_adapter(make_model("qwen3"), tmp_path / "adapter", target_modules=["q_proj"])
    saved = load_file(folder / "adapter_model.safetensors")
    before = {name.removeprefix("base_model.model."): tensor.clone() for name, tensor in saved.items()}

    def read_and_cut() -> bool:
        """Read the folder, and look at its tensors when the trainer has begun to write the next adapter over it."""
        found = AdapterFolder.read(folder).tensors
        os.truncate(folder / "adapter_model.safetensors", 0)
        return found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)

    assert run_ranks(read_and_cut) == [True]
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        AdapterFolder.read(folder)
