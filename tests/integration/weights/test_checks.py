"""The weights checker of a service: digests, snapshots, comparisons, and overwriting."""

from __future__ import annotations

import copy
import hashlib
import json
import threading

import pytest
import torch
from torch import nn

from lockstep.integration.plain_values import plain
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import NotIdle, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digests.checker import tensor_sha256
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.digests.sglang import per_engine_checksum, rank_record
from lockstep.weight_sync.errors import SessionError

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture
def service(model) -> RolloutService:
    return RolloutService(Engine(copy.deepcopy(model), EngineConfig(kv_cache="16 blocks", max_num_seqs=4)))


def resident(service: RolloutService) -> dict[str, torch.Tensor]:
    return dict(service.engine.weights.resident_tensors())


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def test_a_checksum_covers_every_tensor_once_and_changes_nothing(service, model):
    report = service.weights_checker()
    assert report["success"] and report["seconds"] > 0
    assert list(report["tensors"]) == [name for name, _ in named(model)]  # tied tensors once, rotary tables not at all
    assert report["tensors"][NORM] == tensor_sha256(NORM, model.model.norm.weight.detach()).hex()
    digests = b"".join(bytes.fromhex(report["tensors"][name]) for name in sorted(report["tensors"]))
    assert report["rank_digest"] == hashlib.sha256(digests).hexdigest()
    assert report["model_digest"] == model_digest(named(model))
    assert report["num_bytes"] == sum(tensor.nbytes for _, tensor in named(model))
    again = service.weights_checker("checksum")
    assert again | {"seconds": 0} == report | {"seconds": 0}
    json.dumps(plain(report))


def test_a_checksum_speaks_sglangs_form_too(service, model):
    report = service.weights_checker("checksum")
    [record] = report["ranks"]
    assert record == rank_record(named(model))
    assert report["per_engine_checksum"] == per_engine_checksum([record["per_gpu_checksum"]])


def test_one_changed_byte_changes_one_tensors_digest_and_all_above_it(service):
    before = service.weights_checker()
    resident(service)[NORM].view(-1).view(torch.uint8)[5] ^= 1
    after = service.weights_checker()
    assert [name for name in before["tensors"] if before["tensors"][name] != after["tensors"][name]] == [NORM]
    for key in ("rank_digest", "model_digest", "per_engine_checksum"):
        assert before[key] != after[key]


def test_skipped_tensors_are_named_by_a_part_of_their_names(service):
    report = service.weights_checker("checksum", skip_tensor_list=["mlp", "norm"])
    assert report["tensors"] and not [n for n in report["tensors"] if "mlp" in n or "norm" in n]


def test_compare_names_what_changed_and_by_how_much(service):
    assert service.weights_checker("compare")["success"] is False  # no snapshot to compare with
    service.weights_checker("snapshot")
    with torch.no_grad():
        resident(service)[NORM][3] += 0.5
        resident(service)[NORM][4] -= 0.25
    report = service.weights_checker("compare")
    assert report["success"] is False
    [changed] = report["changed"]
    assert (changed["name"], changed["num_differing"], changed["max_abs_err"]) == (NORM, 2, 0.5)
    assert changed["mean_abs_err"] == pytest.approx(0.75 / 64)
    assert "check tensor equality failed" in report["message"] and f"{NORM}: max_abs_err=0.5" in report["message"]
    assert (report["missing"], report["unexpected"]) == ((), ())
    with torch.no_grad():
        resident(service)[NORM][3] -= 0.5
        resident(service)[NORM][4] += 0.25
    assert service.weights_checker("compare")["success"] is True


def test_a_mapping_in_the_place_of_named_tensors_is_named(model):
    service = RolloutService(Engine(model, EngineConfig(kv_cache="16 blocks")))
    with pytest.raises(ValueError, match=r"named tensors are pairs, not a mapping: pass its items\(\)"):
        service.update_weights_from_named_tensors(model.state_dict())
    assert service.state()["weight_update"]["state"] != "open"
    service.close()


def test_reset_tensors_are_random_and_only_a_full_update_heals_them(service, model):
    kept = {name: tensor.clone() for name, tensor in resident(service).items()}
    buffers = {name: tensor.clone() for name, tensor in service.engine.model.buffers()}
    service.weights_checker("snapshot")
    assert service.weights_checker("reset_tensors", seed=3)["success"]
    assert not [name for name, tensor in resident(service).items() if torch.equal(tensor, kept[name])]
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in service.engine.model.buffers())
    report = service.weights_checker("compare")
    assert {changed["name"] for changed in report["changed"]} == set(kept)
    for refused in (lambda: service.engine.generate([[1, 2, 3]], PARAMS), service.continue_generation):
        with pytest.raises(SamplingRefused, match=f"{len(kept)} weights"):
            refused()
    pairs = named(model)
    service.update_weights_from_named_tensors(pairs[:-1], weight_version="1")
    with pytest.raises(SamplingRefused, match="1 weights"):
        service.continue_generation()
    service.update_weights_from_named_tensors(pairs[-1:], weight_version="1")
    service.continue_generation()
    assert service.weights_checker("compare")["success"]
    assert service.engine.weight_digest == service.model_digest() == model_digest(pairs)
    assert service.engine.generate([[1, 2, 3]], PARAMS)[0].weight_version == "1"


def test_nothing_is_reset_under_running_requests_or_an_open_session(service):
    before = service.model_digest()
    service.engine.add([1, 2, 3], PARAMS)
    service.engine.step()
    with pytest.raises(NotIdle, match="1 running"):
        service.weights_checker("reset_tensors")
    assert service.weights_checker("checksum")["model_digest"] == before  # a check is allowed
    service.engine.abort_request(abort_all=True)
    service.begin_weight_update()
    with pytest.raises(SessionError, match="open"):
        service.weights_checker("reset_tensors")
    service.abort_weight_update()
    assert service.model_digest() == before


def test_an_unknown_action_is_refused_by_name(service):
    with pytest.raises(ValueError, match="Unsupported action='shake'"):
        service.weights_checker("shake")


def test_it_looks_between_two_steps_of_an_engine_that_runs(service):
    with service.engine.model.rollout_phase():
        service.engine.start()
        answers: list = []
        long = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)
        thread = threading.Thread(target=lambda: answers.extend(service.engine.generate([[1, 2]], long)), daemon=True)
        thread.start()
        digests = {service.weights_checker()["model_digest"] for _ in range(5)}
        thread.join(30)
        service.engine.stop()
    assert digests == {service.model_digest()}
    assert answers[0].num_completion_tokens == 100
