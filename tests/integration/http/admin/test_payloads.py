"""Tests of frameworks' payloads and folders over a socket: verl's tensors by rank, disk deltas, pulled checkpoints."""

from __future__ import annotations

import base64
import copy
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor, nn

from lockstep.integration.service import RolloutService
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import DATA_FILE, save_delta
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.disk.folder import save_folder

pytestmark = pytest.mark.slow  # over real sockets

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
RUNNERS = ("sglang.srt.model_executor.model_runner",
           "sglang.srt.model_executor.model_runner_components.weight_updater")  # fmt: skip
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def model(model) -> nn.Module:
    return model.requires_grad_(False)


def later(model: nn.Module, seed: int) -> nn.Module:
    """Make the model of some steps later: one element in ten has changed."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 0.1
        parameter[chosen] += 0.1
    return other


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def post(client: httpx.Client, path: str, **body: object) -> dict:
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == 200 and answer.json()["success"], answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, **body: object) -> str:
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == 400 and answer.json()["success"] is False, answer.text
    return answer.json()["message"]


def stands(service: RolloutService, model: nn.Module) -> str:
    """Check that the engine has these weights and generates as transformers does. Returns the answer's version."""
    assert service.model_digest() == model_digest(model.named_parameters())
    [completion] = service.engine.generate([PROMPT], GREEDY)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0]
    assert list(completion.token_ids) == whole[len(PROMPT) :].tolist()
    return completion.weight_version


# -- a pickle for each rank inside a pickle ---------------------------------------------------------------------------


@pytest.fixture
def per_rank() -> Iterator[Callable]:
    """Make per_rank(module, values): SGLang's LocalSerializedTensor in that module, which exists for this test only."""
    made = {}
    for module in RUNNERS:
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        made[module] = make_dataclass("LocalSerializedTensor", ["values"])
        made[module].__module__ = module
        sys.modules[module].LocalSerializedTensor = made[module]
    sharing = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield lambda module, values: made[module](values)
    torch.multiprocessing.set_sharing_strategy(sharing)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def serialize(value: object) -> bytes:
    """Pickle as SGLang's MultiprocessingSerializer does."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def as_text(value: object) -> str:
    return base64.b64encode(serialize(value)).decode()


@pytest.mark.parametrize("module", RUNNERS)
def test_tensors_that_are_serialized_for_each_rank_land(client, service, model, per_rank, module):
    """Play verl's ServerAdapter: resume the weights, send buckets without a load format that flush, resume the KV."""
    newer = later(model, 1)
    assert client.post("/release_memory_occupation", json={"tags": ["kv_cache", "weights"]}).json() is None
    assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).json() is None
    for bucket in (named(newer)[::2], named(newer)[1::2]):
        entries = [(name, per_rank(module, [serialize(tensor.clone())])) for name, tensor in bucket]
        post(client, "update_weights_from_tensor", serialized_named_tensors=[as_text(entries)], weight_version="2")
    assert client.get("/flush_cache").status_code == 200
    assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).json() is None
    assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    assert stands(service, newer) == "2"


def test_what_is_hidden_in_a_ranks_own_pickle_is_not_run(client, service, model, per_rank, tmp_path):
    class Attack:
        def __reduce__(self) -> tuple:
            return os.system, (f"touch {tmp_path / 'marker'}",)

    entries = [(EMBED, per_rank(RUNNERS[0], [pickle.dumps(Attack())]))]
    said = refused(client, "update_weights_from_tensor", serialized_named_tensors=[as_text(entries)])
    assert "blocked unsafe global" in said and not (tmp_path / "marker").exists()
    assert stands(service, model) == "default"


# -- folders ----------------------------------------------------------------------------------------------------------


def test_slimes_disk_delta_lands_on_its_base_and_is_refused_by_any_other(client, service, model, tmp_path):
    newer = later(model, 1)
    save_delta(tmp_path / "weight_v000002", "1", "2", encode_delta(dict(named(model)), named(newer)))
    for _ in range(2):  # the second time it changes nothing
        client.post("/pause_generation", json={})
        assert client.get("/flush_cache").status_code == 200
        post(client, "update_weights_from_disk", model_path=str(tmp_path / "weight_v000002"), weight_version="2")
        client.post("/continue_generation", json={})
        assert client.get("/get_weight_version").json() == {"weight_version": "2"}
        assert stands(service, newer) == "2"
    other = later(newer, 2)
    save_folder(tmp_path / "other", named(other), "3")
    post(client, "update_weights_from_disk", model_path=str(tmp_path / "other"), weight_version="3")
    said = refused(client, "update_weights_from_disk", model_path=str(tmp_path / "weight_v000002"), weight_version="2")
    assert EMBED in said and stands(service, other) == "3"


@pytest.fixture
def published(model, tmp_path) -> tuple[Path, dict[int, nn.Module]]:
    """Publish a checkpoint, version 1, and two deltas after it. Returns the weights of each version."""
    source, states = tmp_path / "shared", {1: model}
    model.save_pretrained(tmp_path / "first")  # with the other files of a model folder
    extra = {"config.json": (tmp_path / "first" / "config.json").read_bytes()}
    save_folder(source / "weight_v000001", named(model), "1", extra_files=extra)
    for version in (2, 4):
        base = max(states)
        states[version] = later(states[base], version)
        chunks = encode_delta(dict(named(states[base])), named(states[version]))
        save_delta(source / f"weight_v{version:06d}", str(base), str(version), chunks)
    return source, states


def test_a_version_is_pulled_then_loaded_in_slimes_order(client, service, published, tmp_path):
    source, states = published
    local = tmp_path / "local"
    before = client.get("/state").json()["weight_version"]
    for version, deltas in ((2, [2]), (4, [4])):
        reply = post(
            client, "pull_weights", local_checkpoint_dir=str(local), source_dir=str(source), target_version=version
        )
        assert reply["message"] and reply["report"]["deltas"] == deltas
        assert client.get("/state").json()["weight_version"] == before  # a pull does not touch the engine
        client.post("/pause_generation", json={})
        assert client.get("/flush_cache").status_code == 200
        post(client, "update_weights_from_disk", model_path=str(local), weight_version=str(version))
        client.post("/continue_generation", json={})
        before = client.get("/get_weight_version").json()["weight_version"]
        assert before == str(version) == stands(service, states[version])
        info = client.get("/model_info").json()
        assert info["model_path"] == str(local) and info["weight_version"] == str(version)


def test_a_pull_goes_on_beside_generation_and_twice_is_once(client, service, published, tmp_path):
    source, states = published
    body = {"local_checkpoint_dir": str(tmp_path / "local"), "source_dir": str(source), "target_version": "4"}
    stream = service.engine.stream(PROMPT, SamplingParams(max_new_tokens=40, ignore_eos=True))
    next(stream)
    assert post(client, "pull_weights", **body)["report"]["deltas"] == [2, 4]
    assert post(client, "pull_weights", **body)["report"]["base_version"] is None  # the checkpoint is there already
    assert [c.completion.finish_reason.type for c in stream if c.completion] == ["length"]
    assert stands(service, states[1]) == "default"


def test_a_pull_that_cannot_be_done_says_why_and_leaves_the_local_folder(client, published, tmp_path):
    source, _ = published
    local = tmp_path / "local"
    body = {"local_checkpoint_dir": str(local), "source_dir": str(source)}
    post(client, "pull_weights", **body, target_version=2)
    held = sorted((path.name, path.read_bytes()) for path in local.iterdir())
    assert "3" in refused(client, "pull_weights", **body, target_version=3)
    data = source / "weight_v000004" / DATA_FILE
    data.write_bytes(data.read_bytes()[:-40])
    assert refused(client, "pull_weights", **body, target_version=4)
    assert sorted((path.name, path.read_bytes()) for path in local.iterdir()) == held
