"""Weights that are written without a commit: noticed at the next phase, so that no KV or digest of others is used."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digests.model_digest import model_digest

PROMPT = [5 + i % 90 for i in range(40)]


def make_service(model: torch.nn.Module) -> RolloutService:
    return RolloutService(Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4)))


def answer(service: RolloutService) -> Completion:
    with service.engine.model.rollout_phase():
        [found] = service.engine.generate([PROMPT], SamplingParams(max_new_tokens=8, sampling_seed=3, ignore_eos=True))
    return found


def write(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def commit(service: RolloutService, model: torch.nn.Module, version: str) -> None:
    service.commit_in_place(version, source=model.named_parameters())


def test_weights_written_without_a_commit_get_kv_of_their_own_and_no_digest(
    make_model, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    before = answer(service)
    assert before.weight_digest is not None
    write(model)
    with caplog.at_level(logging.WARNING):
        found = answer(service)
        again = answer(service)
    assert sum("since version 'one'" in record.message for record in caplog.records) == 1, "once for each change"
    assert (found.num_cached_tokens, found.weight_version, found.weight_digest) == (0, "one", None)
    other = make_model("qwen2")
    write(other)
    expected = answer(make_service(other))
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs) != (
        before.token_ids, before.logprobs,
    )  # fmt: skip
    assert again.num_cached_tokens > 0
    commit(service, model, "two")
    assert answer(service).weight_digest is not None
    service.close()


def test_a_write_between_the_first_commit_and_the_first_phase_is_noticed(make_model) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    write(model)
    assert answer(service).weight_digest is None
    service.close()


def replace_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def write_uncounted(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)  # as optimizers with kernels of their own write: no version counter moves


def write_one_uncounted(model: torch.nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.weight.data.add_(0.25)


def write_stored_buffer(model: torch.nn.Module) -> None:
    model.scale.mul_(2)


def test_other_data_writes_that_torch_does_not_count_and_written_buffers_are_noticed(
    make_model, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2")
    model.register_buffer("scale", torch.ones(1))
    model.register_buffer("table", torch.ones(1), persistent=False)
    service = make_service(model)
    changes = replace_data, write_uncounted, write_one_uncounted, write_stored_buffer
    for version, change in zip(("one", "two", "three", "four"), changes, strict=True):
        commit(service, model, version)
        assert answer(service).weight_digest is not None
        with caplog.at_level(logging.WARNING):
            model.table.mul_(2)  # computed from the configuration, in no checkpoint
            assert answer(service).num_cached_tokens > 0 and not caplog.records
            change(model)
            found = answer(service)
        assert (found.num_cached_tokens, found.weight_digest) == (0, None)
        assert f"weights were written or moved since version '{version}'" in caplog.text
        caplog.clear()
    service.close()


def test_memory_that_the_engine_itself_moves_is_no_write(
    make_model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("qwen2").save_pretrained(tmp_path)
    service = RolloutService(Engine(tmp_path, EngineConfig(kv_cache="64 blocks")))
    answer(service)
    with caplog.at_level(logging.WARNING):
        service.release_memory_occupation(["weights"])
        service.resume_memory_occupation(["weights"])
        service.begin_weight_update(weight_version="two")
        service.update_weights_from_named_tensors(make_model("qwen2").named_parameters())
        service.end_weight_update()
        assert answer(service).weight_digest is not None
    assert not [record for record in caplog.records if "since version" in record.message]
    service.close()


def test_committed_and_reverted_writes_are_no_surprise(make_model, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    answer(service)
    with caplog.at_level(logging.WARNING):
        for version in ("two", "three"):
            with service.optimizer_step():
                write(model)
            commit(service, model, version)
            assert answer(service).weight_version == version
        service.update_weights_from_named_tensors([("lm_head.weight", model.lm_head.weight.detach() * 2)])
        service.abort_weight_update()
        assert answer(service).weight_digest is not None
    assert not [record for record in caplog.records if "since version" in record.message]
    service.close()


@pytest.mark.parametrize("samples_between", [True, False])
def test_the_digest_of_a_partial_update_is_of_all_that_was_written(make_model, samples_between: bool) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    answer(service)
    write(model)
    if samples_between:
        answer(service)
    service.begin_weight_update(weight_version="two", coverage="partial")
    service.update_weights_from_named_tensors([("model.norm.weight", model.model.norm.weight.detach() * 2)])
    service.end_weight_update()
    assert service.engine.weight_digest == model_digest(model.named_parameters())
    service.close()


def test_a_switched_adapter_brings_no_digest_of_former_weights_back(make_model) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("qwen2"), peft.LoraConfig(target_modules=["q_proj"]))
    service = make_service(model.base_model.model)
    commit(service, model.base_model.model, "one")
    assert answer(service).weight_digest is not None
    write(model)
    assert answer(service).weight_digest is None
    for enabled in (False, True):
        for layer in model.modules():
            if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                layer.enable_adapters(enabled)
        assert answer(service).weight_digest is None
    service.close()


def move(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as `model.to("cpu")` and back


def write_and_restore(model: torch.nn.Module) -> None:
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    write(model)
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)


def change_between_samples(model: torch.nn.Module) -> None:
    move(model)
    model.model.layers[0].mlp.up_proj.weight.data.view(-1)[1] += 1


@pytest.mark.parametrize("change", [move, write_and_restore])
def test_moved_and_restored_weights_keep_digest_and_kv_where_their_digest_is_the_same(
    make_model, caplog: pytest.LogCaptureFixture, change
) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    before = answer(service)
    with caplog.at_level(logging.WARNING):
        change(model)
        found = answer(service)
    assert not caplog.records and found.num_cached_tokens > 0
    assert (found.token_ids, found.logprobs) == (before.token_ids, before.logprobs)
    assert (found.weight_version, found.weight_digest) == ("one", before.weight_digest)
    change_between_samples(model)
    assert answer(service).weight_digest is None
    service.close()


def test_a_stored_buffer_that_is_moved_keeps_the_digest_and_one_that_is_written_does_not(make_model) -> None:
    model = make_model("qwen2")
    model.register_buffer("scale", torch.ones(1))
    service = make_service(model)
    commit(service, model, "one")
    before = answer(service)
    model.scale.data = model.scale.data.clone()
    assert answer(service).weight_digest == before.weight_digest is not None
    model.scale.data = 2 * model.scale.data
    assert answer(service).weight_digest is None
    service.close()


def test_a_write_before_adapters_are_switched_brings_no_digest_back(make_model) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("qwen2"), peft.LoraConfig(target_modules=["q_proj"]))
    base = model.base_model.model
    service = make_service(base)
    commit(service, base, "one")
    assert answer(service).weight_digest is not None
    with model.disable_adapter():
        assert answer(service).weight_digest is None
        write(model)
    assert answer(service).weight_digest is None
    service.close()


def test_a_digest_that_is_computed_later_is_not_that_of_a_version_after_it(make_model) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    service.commit_in_place("one", source=model.named_parameters(), digest="later")
    digests, computed, go_on = service.sessions.weights.digests, threading.Event(), threading.Event()

    def slow(names):
        found = digests(names)
        computed.set()
        assert go_on.wait(20)
        return found

    service.sessions.weights.digests = slow
    finishing = threading.Thread(target=service.finish_digest)
    finishing.start()
    assert computed.wait(20)
    service.sessions.weights.digests = digests
    write(model)
    commit(service, model, "two")
    go_on.set()
    finishing.join()
    expected = model_digest(model.named_parameters())
    assert answer(service).weight_digest == expected == service.model_digest()
    commit(service, model, "three")
    assert service.engine.weight_digest == expected
    service.close()


@pytest.mark.parametrize("label", ["one", "two"])
def test_a_receipt_claims_the_digest_that_was_known_when_its_tokens_were_drawn(make_model, label: str) -> None:
    model = make_model("qwen2")
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, receipts="tokens")))
    commit(service, model, "one")
    before = answer(service)
    assert before.receipt["spans"][0]["digest"] == before.weight_digest is not None
    write(model)
    assert answer(service).receipt["spans"][0]["digest"] is None, "an uncommitted write under the same version"
    service.commit_in_place(label, source=model.named_parameters(), digest="later")
    assert answer(service).receipt["spans"][0]["digest"] is None
    assert answer(service).receipt["spans"][0]["digest"] == service.engine.weight_digest
    digest = service.finish_digest()
    assert answer(service).receipt["spans"][0]["digest"] == digest == service.model_digest()
    service.close()


def test_an_interrupted_look_finds_the_write_again(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    service = make_service(model)
    commit(service, model, "one")
    answer(service)
    change_between_samples(model)
    watch = service.engine.gate.weights
    have_digest = watch.have_digest

    def interrupted(names) -> bool:
        raise KeyboardInterrupt

    watch.have_digest = interrupted
    with pytest.raises(KeyboardInterrupt):
        answer(service)
    watch.have_digest = have_digest
    assert answer(service).weight_digest is None
    service.close()


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_that_comes_to_a_part_without_any_is_in_the_digest(make_model, kind: str) -> None:
    model = make_model("qwen2")
    layer, vector = model.model.layers[0], torch.full((model.config.hidden_size,), 0.5)
    layer.register_forward_hook(lambda module, inputs, out: out + module.steer if hasattr(module, "steer") else out)
    service = make_service(model)
    commit(service, model, "one")
    before, digest = answer(service), service.engine.weight_digest
    if kind == "buffer":
        layer.register_buffer("steer", vector)
    else:
        layer.register_parameter("steer", torch.nn.Parameter(vector, requires_grad=False))
    commit(service, model, "two")
    assert answer(service).logprobs != before.logprobs and service.engine.weight_digest != digest
    assert service.engine.weight_digest == service.model_digest()
    service.close()
