"""Updates from folders with the names and pieces in which mixtures of experts are published."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lockstep.integration.push.adapters.trainer_tensors import trainer_tensors
from lockstep.integration.replay.folders import FolderWeights
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import run_ranks
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.errors import DigestMismatch, TransferFailed

FILE = "model.safetensors"
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
CONFIG = EngineConfig(kv_cache="16 blocks", max_num_seqs=4)
FAMILIES = ["qwen3_moe", "qwen3_5_moe", "qwen3_next", "kimi_linear", "nemotron_h", "lfm2_moe", "deepseek_v4"]
FAMILIES += ["jamba"]
FAMILIES += ["minimax", "inkling2", "qwen4_exp"]  # whose gates and ups are pairs; whose n-grams lie in pieces
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"


def newer(model: PreTrainedModel) -> PreTrainedModel:
    """Change every tensor of a trainer's model."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, tensor in trainer_tensors(model):
            change = 0.1 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(tensor + change if tensor.is_floating_point() else tensor.roll(1, 0))
    return model


def digest_of(model: PreTrainedModel) -> str:
    return model_digest(trainer_tensors(model))


@pytest.fixture
def make_service() -> Callable[..., RolloutService]:
    made: list[RolloutService] = []

    def make(model: PreTrainedModel | Path) -> RolloutService:
        made.append(RolloutService(Engine(model, CONFIG)))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_names_each_expert_is_read_whole(family, make_model, make_service, tmp_path):
    service, model = make_service(make_model(family)), newer(make_model(family))
    model.save_pretrained(tmp_path / "new")
    names = set(load_file(tmp_path / "new" / FILE))
    assert any(".experts." in name and name not in model.state_dict() for name in names), "published as it is here"
    record = service.update_weights_from_disk(tmp_path / "new", weight_version="1")
    service.engine.generate([[1, 2, 3]], PARAMS)  # commits it
    assert (service.engine.weight_version, service.engine.weight_digest) == ("1", digest_of(model))
    assert record.num_tensors == len(model.state_dict()) - len(service.engine.model.tied_names())
    assert service.model_digest() == digest_of(model)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "zamba", "zamba2"])
def test_a_folder_of_state_spaces_is_read_whole_also_where_layers_share_a_block(
    family, make_model, make_service, tmp_path
):
    service, model = make_service(make_model(family)), newer(make_model(family))
    model.save_pretrained(tmp_path / "new")
    record = service.update_weights_from_disk(tmp_path / "new", weight_version="1")
    service.engine.generate([[1, 2, 3]], PARAMS)  # commits it
    assert (service.engine.weight_version, service.engine.weight_digest) == ("1", digest_of(model))
    tied = service.engine.model.tied_names()
    assert bool(tied) == (family != "mamba2") and record.num_tensors == len(model.state_dict()) - len(tied)
    loaded = make_service(tmp_path / "new")
    assert loaded.model_digest() == digest_of(model)
    [mine, its] = [one.engine.generate([[1, 2, 3]], PARAMS)[0] for one in (service, loaded)]
    assert (mine.token_ids, mine.logprobs) == (its.token_ids, its.logprobs)


@pytest.fixture
def folder(make_model, tmp_path) -> Path:
    newer(make_model("qwen3_moe")).save_pretrained(tmp_path / "new")
    return tmp_path / "new"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}), f"{EXPERT} is bfloat16, and model.layers.0.mlp.experts"),
        (lambda t: t.pop(EXPERT), r"the folder has \[3, 4\] pieces of it"),
        (lambda t: t.pop(EXPERT.replace("gate", "up")), r"the folder has \[4, 3\] pieces of it"),
        (lambda t: t.update({EXPERT: t[EXPERT][1:].contiguous()}), f"{EXPERT} is"),
        (lambda t: t.update({"model.layers.9.more.weight": torch.zeros(2)}), "layers.9.more.weight: not a tensor"),
        (lambda t: [t.pop(n) for n in list(t) if "layers.0.mlp.experts" in n and "down" in n], "lacks 1 parameters"),
    ],
    ids=["dtype", "a gate lacks", "an up lacks", "shape", "unknown", "a parameter lacks"],
)  # fmt: skip
def test_a_folder_that_does_not_fit_leaves_no_trace(edit, message, folder, make_model, make_service):
    service = make_service(make_model("qwen3_moe"))
    digest = service.model_digest()
    change(folder, edit)
    with pytest.raises(ValueError, match=message):
        service.update_weights_from_disk(folder, weight_version="1")
    service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.engine.weight_version == "default" and service.model_digest() == digest


def test_the_folders_own_digests_are_compared(folder, make_model, make_service, tmp_path):
    model = newer(make_model("qwen3_moe"))
    service = make_service(make_model("qwen3_moe"))
    digest = service.model_digest()
    save_folder(tmp_path / "saved", load_file(folder / FILE).items(), "1")
    change(tmp_path / "saved", lambda tensors: tensors[EXPERT].view(-1)[0].add_(1))
    with pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
        service.update_weights_from_disk(tmp_path / "saved")
    assert service.model_digest() == digest
    service.update_weights_from_disk(tmp_path / "saved", verify=False)
    change(tmp_path / "saved", lambda tensors: tensors.update(load_file(folder / FILE)))
    service.update_weights_from_disk(tmp_path / "saved")
    assert service.model_digest() == digest_of(model)


def test_a_file_that_is_written_anew_while_it_is_read_leaves_the_old_weights(folder, make_model, make_service):
    def cut_short() -> tuple[str, bool]:
        """Update as the trainer begins to write its next checkpoint over this one."""
        service = make_service(make_model("qwen3_moe"))
        digest, weights = service.model_digest(), service.sessions.weights
        weights.require_all = lambda *_: os.truncate(folder / FILE, 0)  # after the headers were read
        with pytest.raises(TransferFailed, match="became shorter") as failed:
            service.update_weights_from_disk(folder, weight_version="1")
        return str(failed.value), service.model_digest() == digest

    [(says, is_as_before)] = run_ranks(cut_short)
    assert FILE in says and is_as_before


def test_a_file_that_was_replaced_after_its_header_was_read_is_refused(folder, make_model, make_service):
    service, other = make_service(make_model("qwen3_moe")), folder.parent / "other"
    shutil.copy(folder / FILE, other)
    service.sessions.weights.require_all = lambda *_: os.replace(other, folder / FILE)
    with pytest.raises(TransferFailed, match="changed after its header was read"):
        service.update_weights_from_disk(folder, weight_version="1")


def test_weights_of_such_a_folder_come_back_after_a_release(folder, make_service):
    service = make_service(folder)
    digest = service.model_digest()
    service.update_weights_from_disk(folder, weight_version="1")
    service.commit_implicit_update()
    service.release_memory_occupation()
    service.resume_memory_occupation()
    service.engine.generate([[1, 2, 3]], PARAMS)
    assert (service.engine.weight_version, service.model_digest()) == ("1", digest)


def test_a_replay_finds_the_weights_of_such_a_folder(folder, make_model, make_service):
    model = newer(make_model("qwen3_moe"))
    make_model("qwen3_moe").save_pretrained(folder.parent / "base")
    service = make_service(folder.parent / "base")
    weights = FolderWeights(service, [folder.parent], [digest_of(model)])
    assert weights.has(digest_of(model))
    weights.switch(digest_of(model))
    assert service.model_digest() == digest_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_each_rank_takes_its_part_of_such_a_folder(tp, pp, folder, make_model, run_world):
    old = make_model("qwen3_moe")
    expected = digest_of(newer(make_model("qwen3_moe")))

    def rank(rank: int) -> object:
        config = EngineConfig(tp=tp, pp=pp, k_blocks=4, kv_cache="64 blocks", max_num_seqs=4, rank_timeout_s=60.0)
        service = RolloutService(Engine(old, config))
        service.update_weights_from_disk(folder, weight_version="1")
        service.engine.generate([[1, 2, 3]] if service.engine.is_controller else None, PARAMS)
        found = service.engine.weight_digest, service.model_digest()
        service.close()
        return found

    for found in run_world(tp * pp, rank):
        assert found == (expected, expected)
