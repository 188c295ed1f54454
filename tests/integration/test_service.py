"""The service: commits in place, phases, partly written weights, memory."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.integration.weights.memory import MemoryReport
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import MemoryReleased, NotIdle, PhaseError, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.errors import Poisoned, SessionError
from lockstep.weight_sync.transaction.in_place import sync_in_place, write_tensor

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


@pytest.mark.parametrize("version", [3, None, ["x"], "", "\ud800", b"7"], ids=repr)
def test_a_version_that_no_answer_could_bear_is_refused_by_every_verb(model, service, version):
    said = "a weight version must be a text, not empty, that UTF-8 can encode, not " + re.escape(repr(version))
    with pytest.raises(ValueError, match=said):
        service.commit_in_place(version, source=model.named_parameters())
    with pytest.raises(ValueError, match=said):
        service.update_weight_version(version)
    if version is not None:  # as if none was given
        with pytest.raises(ValueError, match=said):
            service.begin_weight_update(weight_version=version)
        with pytest.raises(ValueError, match=said):
            service.update_weights_from_named_tensors(model.named_parameters(), weight_version=version)
        service.begin_weight_update(coverage="partial")
        with pytest.raises(ValueError, match=said):
            service.end_weight_update(weight_version=version)
        service.abort_weight_update()
    assert (service.get_weight_version(), service.engine.epoch) == ("default", 0)


def test_names_that_are_missing_are_told_from_tensors_that_are_stored_elsewhere(model, service):
    source = dict(model.named_parameters())
    source["model.norm.weight"] = source["model.norm.weight"].detach().clone()
    del source["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"storage.*place: model\.norm\.weight; not in source.*: \S+$"):
        service.commit_in_place("2", source=source.items())
    wrapped = [(f"module.{name}", p) for name, p in model.named_parameters()]
    with pytest.raises(ValueError, match=r"^not in source.* and \d+ more \(.* begin with 'module\.'") as caught:
        service.commit_in_place("2", source=wrapped)
    assert len(str(caught.value)) < 500 and "storage" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda model: model, "source is a Qwen2ForCausalLM"),
        (lambda model: model.state_dict(), "source is a OrderedDict"),
        (lambda model: None, "source is a NoneType"),
        (lambda model: model.parameters(), "source yields a Parameter"),
        (lambda model: [("a", 1)], "source yields a str and a int"),
    ],
)
def test_a_source_that_names_no_tensors_is_refused_with_what_to_pass(model, service, make, kind):
    with pytest.raises(ValueError, match=rf"^{kind}.*: pass model\.named_parameters\(\)$"):
        service.commit_in_place("2", source=make(model))


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
    with service.optimizer_step(), pytest.raises(SamplingRefused, match="is writing the weights"):
        service.engine.generate([[1, 2, 3]], PARAMS)
    with pytest.raises(SamplingRefused, match="commit"):
        service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.state()["num_waiting"] == 0  # the refused request left no state behind
    service.commit_in_place("1", source=model.named_parameters())
    assert len(service.engine.generate([[1, 2, 3]], PARAMS)) == 1


def fail_in_a_step(service: RolloutService, write: Callable[[], object] = lambda: None) -> None:
    def step() -> None:
        with service.optimizer_step():
            write()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        step()


def test_after_a_step_that_failed_nothing_is_committed_or_sampled_before_one_that_completes(model, service):
    fail_in_a_step(service)
    for _ in range(2):
        with pytest.raises(Poisoned, match=r"boom.*complete one.*weights_restored"):
            service.commit_in_place("1", source=model.named_parameters())
        with pytest.raises(SamplingRefused, match="boom"):
            service.engine.generate([[1, 2, 3]], PARAMS)
        with pytest.raises(SamplingRefused, match="boom"):
            service.continue_generation()
    with service.optimizer_step():
        pass
    with pytest.raises(SamplingRefused, match="commit"):
        service.engine.generate([[1, 2, 3]], PARAMS)
    service.commit_in_place("1", source=model.named_parameters())
    [completion] = service.engine.generate([[1, 2, 3]], PARAMS)
    assert completion.weight_version == "1"


def test_after_a_step_that_failed_a_restored_checkpoint_may_be_committed(model, service):
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    digest = service.commit_in_place("1", source=model.named_parameters()).digest
    fail_in_a_step(service, lambda: model.lm_head.weight.data.add_(1))
    model.load_state_dict(kept)
    service.weights_restored()
    assert service.commit_in_place("2", source=model.named_parameters()).digest == digest
    assert service.engine.generate([[1, 2, 3]], PARAMS)[0].weight_version == "2"


def test_requests_of_a_started_engine_wait_for_the_commit_after_a_step(model, service):
    answers: list = []
    with service.engine.model.rollout_phase():
        service.engine.start()
        with service.optimizer_step():
            thread = threading.Thread(
                target=lambda: answers.extend(service.engine.generate([[1, 2, 3]], PARAMS)), daemon=True
            )
            thread.start()
            deadline, pulse = time.monotonic() + 30, threading.Event()
            while not service.state()["num_waiting"]:
                assert time.monotonic() < deadline
                pulse.wait(0.001)
        assert not answers and service.state()["metrics"]["num_output_tokens"] == 0
        service.commit_in_place("1", source=model.named_parameters())
        thread.join(30)
        service.engine.stop()
    assert [completion.weight_version for completion in answers] == ["1"]


def test_the_trainer_and_a_session_do_not_write_at_the_same_time(model, service):
    service.begin_weight_update(coverage="partial")
    with pytest.raises(SessionError, match=r"optimizer_step: .*open"), service.optimizer_step():
        raise AssertionError("it must not get here")
    with pytest.raises(SessionError, match=r"commit_in_place: .*open"):
        service.commit_in_place("1", source=model.named_parameters())
    service.abort_weight_update()
    assert service.commit_in_place("1", source=model.named_parameters()).version == "1"


def test_what_the_trainer_wrote_is_not_taken_back_by_a_revert(model, service):
    service.update_weights_from_named_tensors([("model.norm.weight", torch.zeros(64))], weight_version="1")
    service.continue_generation()
    with service.optimizer_step(), torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    service.commit_in_place("2", source=model.named_parameters())
    with pytest.raises(SessionError, match="no commit"):
        service.revert_weight_update()
    assert (model.model.norm.weight == 2.0).all() and service.get_weight_version() == "2"


def test_a_full_update_mends_torn_weights_and_its_revert_tears_them_again(model, service):
    fail_in_a_step(service)
    service.engine.pause_generation()
    service.begin_weight_update(weight_version="1")
    service.update_weights_from_named_tensors([(n, p.detach() * 2) for n, p in model.named_parameters()])
    service.end_weight_update()
    assert service.engine.refusal is None
    service.revert_weight_update()
    assert "boom" in service.engine.refusal
    with pytest.raises(SamplingRefused, match="boom"):
        service.continue_generation()


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
    report = service.release_memory_occupation()["kv_cache"]
    assert report.bytes_before > 0 and report.bytes_after == service.state()["kv_bytes"] == 0
    assert service.release_memory_occupation(["kv_cache"]) == {"kv_cache": MemoryReport(0, 0)}
    with pytest.raises(MemoryReleased):
        service.engine.generate([[1, 2, 3]], PARAMS)
    assert service.resume_memory_occupation()["kv_cache"] == MemoryReport(0, report.bytes_before)
    unchanged = MemoryReport(report.bytes_before, report.bytes_before)
    again = service.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert again == {"kv_cache": unchanged, "cuda_graph": MemoryReport(0, 0)}
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


def test_a_callers_sequence_does_not_keep_the_trainer_from_the_pools_memory(service):
    engine = service.engine
    with service.rollout():
        [alone] = engine.generate([[1, 2, 3]], PARAMS)
    engine.flush_cache()
    with service.rollout(release_kv=True):
        engine.add([1, 2, 3], PARAMS)
        engine.step()
    assert service.state()["kv_bytes"] == service.state()["num_running"] == 0
    assert service.state()["num_waiting"] == 1
    completions = []
    with service.rollout():
        while engine.has_work:
            completions += engine.step()
    assert (completions[0].token_ids, completions[0].logprobs) == (alone.token_ids, alone.logprobs)


def test_the_digest_is_over_names_and_bytes_of_every_parameter_once(model, service):
    names = [name for name, _ in service.engine.weights.resident_tensors()]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names  # tied to the embedding
    assert len(service.model_digest()) == len(hashlib.sha256().hexdigest())


def test_weights_that_come_back_empty_are_refused_before_they_are_there(model, tmp_path, monkeypatch):
    """The engine's thread may run a step as soon as they are allocated: with nothing in them, every logit is NaN."""
    model.save_pretrained(tmp_path)
    service = RolloutService(Engine(tmp_path, EngineConfig(kv_cache="16 blocks", max_num_seqs=4)))
    service.release_memory_occupation(["weights"])
    weights = service.engine.weights
    allocate, seen = weights.resume_weights, []

    def allocate_and_look() -> int:
        num_bytes = allocate()
        seen.append((service.engine.model.holds_weights, service.engine.refusal))
        return num_bytes

    monkeypatch.setattr(weights, "resume_weights", allocate_and_look)
    report = service.resume_memory_occupation(["weights"])["weights"]
    assert report.bytes_after > report.bytes_before
    [(holds_weights, refusal)] = seen
    assert holds_weights and "weights hold nothing" in refusal
    assert "weights hold nothing since they were released" in service.engine.refusal
    service.close()


def test_kv_is_released_where_the_block_of_a_rollout_raises(service):
    with pytest.raises(ValueError, match="prompt token ids"), service.rollout(release_kv=True):
        service.engine.generate([[-1]], PARAMS)
    assert service.engine.kv_bytes == 0
    with service.rollout():
        assert len(service.engine.generate([[1, 2, 3]], PARAMS)) == 1


def test_an_endless_timeout_is_refused_by_name(service):
    with pytest.raises(ValueError, match="timeout_s must be positive, and below"):
        service.begin_weight_update(timeout_s=float("inf"))
    with pytest.raises(ValueError, match="timeout_s must be positive, and below"):
        service.engine.pause_generation("in_place", timeout_s=float("inf"))


@pytest.mark.parametrize("pauses", [None, "in_place", "retract"])
@pytest.mark.parametrize("keeps", [False, True])
def test_requests_that_run_at_a_commit_in_place_have_the_trainers_numbers(make_model, pauses, keeps):
    """They went on over the KV of the old weights: the version of the new ones stood beside numbers of neither."""
    model = make_model("qwen3").train()
    service = RolloutService(Engine(model, EngineConfig(kv_cache="64 blocks")))
    service.commit_in_place("0", source=model.named_parameters())
    engine = service.engine
    with service.rollout():
        engine.add([5, 6, 7], SamplingParams(max_new_tokens=20, sampling_seed=1, ignore_eos=True))
        for _ in range(6):
            engine.step()
        if pauses:
            engine.pause_generation(pauses)
    with service.optimizer_step(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    service.commit_in_place("1", source=model.named_parameters(), keep_running=keeps)
    with service.rollout():
        engine.continue_generation()
        [answer] = [completion for _ in range(20) for completion in engine.step()]
    first, second = answer.weight_versions
    assert (first.version, second.version) == ("0", "1") and second.start > 0
    ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
    with service.training_numerics(), torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, 2:-1]
    expected = selected_logprobs(logits, ids[0, 3:]).tolist()[second.start :]
    assert (list(answer.logprobs[second.start :]) == expected) == (not keeps or pauses == "retract")
