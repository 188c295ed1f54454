"""Updates outside a session: they are committed together before anything is sampled."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.integration.weights.options import UpdateOptions
from lockstep.rollout.errors import SamplingRefused
from lockstep.tests.integration.weights.sessions.callers import (
    EMBED,
    NORM,
    PARAMS,
    PATIENCE,
    PROMPT,
    answer,
    digest_of,
    failing,
    greedy,
    last_commit,
    named,
    only,
    roots,
    standing,
)
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, SessionError, TransferFailed
from lockstep.weight_sync.manifest import TensorSpec
from lockstep.weight_sync.transaction.undo import UndoLog


def by_continue(service: RolloutService) -> None:
    service.continue_generation()


def by_resume_of_kv(service: RolloutService) -> None:
    service.release_memory_occupation(["kv_cache"])
    service.resume_memory_occupation(["kv_cache"])


def by_generate(service: RolloutService) -> None:
    service.engine.generate([PROMPT], PARAMS)


def by_stream(service: RolloutService) -> None:
    list(service.engine.stream(PROMPT, PARAMS))


def by_agenerate(service: RolloutService) -> None:
    asyncio.run(service.engine.agenerate([PROMPT], PARAMS))


def by_step(service: RolloutService) -> None:
    service.engine.add(PROMPT, PARAMS)
    service.engine.step()


def by_started_engine(service: RolloutService) -> None:
    service.engine.start()
    soon(submit(service.engine.generate, [PROMPT], PARAMS))


COMMITS = [by_continue, by_resume_of_kv, by_generate, by_stream, by_agenerate, by_step, by_started_engine]


@pytest.mark.parametrize("commit", COMMITS)
def test_an_update_outside_a_session_is_committed_before_anything_is_sampled(service, newer, commit):
    service.update_weights_from_named_tensors(named(newer), weight_version="5", verify=roots(newer))
    assert service.get_weight_version() == "default" and service.engine.epoch == 0
    assert service.state()["weight_update"]["state"] == "open"
    commit(service)
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))
    session = last_commit(service)["session"]
    assert (session["coverage"], session["verified"]) == ("full", True)
    [completion] = service.engine.generate([PROMPT], PARAMS)
    assert (tuple(completion.token_ids), completion.weight_version) == (greedy(newer), "5")
    assert service.engine.epoch == 1


def test_several_updates_outside_a_session_are_one_commit_and_may_be_partial(service, model, newer):
    service.update_weights_from_named_tensors(only(newer, NORM), weight_version="5")
    service.update_weights_from_named_tensors(only(newer, EMBED), weight_version="5")
    service.continue_generation()
    assert service.engine.epoch == 1
    with torch.no_grad():
        model.model.norm.weight.copy_(newer.model.norm.weight)
        model.lm_head.weight.copy_(newer.lm_head.weight)
    session = last_commit(service)["session"]
    assert (session["coverage"], session["verified"], session["num_tensors"]) == ("partial", False, 2)
    assert standing(service) == ("5", digest_of(model), 1, digest_of(model))
    assert answer(service) == greedy(model)


def test_an_update_that_is_refused_before_its_first_byte_changes_nothing_at_all(service, model):
    before = standing(service)
    with pytest.raises(ValueError, match="no_such"):
        service.update_weights_from_named_tensors([("no_such", torch.zeros(3))], weight_version="5")
    assert service.state()["weight_update"]["state"] == "idle"
    assert answer(service) == greedy(model)
    assert standing(service) == before


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "iterator"])
def test_a_name_that_comes_twice_is_refused_and_leaves_the_old_weights(service, newer, kind):
    before, expected = standing(service)[:2], answer(service)
    twice = [*named(newer), *only(newer, NORM)]
    with pytest.raises(ValueError, match=f"{NORM}: named more than once"):
        service.update_weights_from_named_tensors(kind(twice), weight_version="1")
    assert standing(service)[:2] == before and answer(service) == expected


def test_an_update_without_a_byte_to_write_does_not_stop_the_engine(service, model):
    with pytest.raises(TransferFailed, match="did not arrive"):
        service.sessions.update(
            "nowhere", lambda sink: (TensorSpec.of(NORM, sink.resident(NORM)),), UpdateOptions(None, PATIENCE)
        )
    assert answer(service) == greedy(model)


def test_a_failure_outside_a_session_takes_all_updates_since_the_commit_back(service, model, newer):
    before = standing(service)
    service.update_weights_from_named_tensors(only(newer, NORM), weight_version="5")
    wrong = roots(newer) | {EMBED: "00" * 32}
    with pytest.raises(DigestMismatch, match="rolled back") as mismatch:
        service.update_weights_from_named_tensors(only(newer, EMBED), weight_version="5", verify=wrong)
    assert mismatch.value.names == (EMBED,)
    assert standing(service) == before
    assert answer(service) == greedy(model)
    assert standing(service) == before


@pytest.mark.parametrize("is_explicit", [False, True], ids=["implicit", "explicit"])
def test_an_update_whose_undo_fails_too_poisons_the_weights(service, newer, monkeypatch, is_explicit):
    def broken(log: UndoLog) -> None:
        raise RuntimeError("the device is gone")

    if is_explicit:
        service.begin_weight_update()
    monkeypatch.setattr(UndoLog, "restore_all", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        service.update_weights_from_named_tensors(failing(named(newer), 3))
    monkeypatch.undo()
    state = service.state()["weight_update"]
    assert state["state"] == "poisoned" and not service.sessions.is_open
    assert "could not be restored (this process: the wire broke)" in state["why"]
    with pytest.raises(SamplingRefused, match=r"poisoned.*the wire broke.*verified"):
        service.engine.generate([PROMPT], PARAMS)
    with pytest.raises(Poisoned, match="the wire broke"):
        service.update_weights_from_named_tensors(named(newer))
    service.begin_weight_update(weight_version="6")
    service.update_weights_from_named_tensors(named(newer), verify=roots(newer))
    service.end_weight_update()
    assert answer(service) == greedy(newer)


def test_inside_a_session_only_the_tensors_that_differ_are_sent_again(service, newer):
    service.begin_weight_update(weight_version="5")
    damaged = copy.deepcopy(newer)
    with torch.no_grad():
        damaged.model.norm.weight[3] += 1
        damaged.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    names = {NORM, "model.layers.0.self_attn.q_proj.weight"}
    with pytest.raises(DigestMismatch, match="repairs") as mismatch:
        service.update_weights_from_named_tensors(named(damaged), verify=roots(newer))
    assert set(mismatch.value.names) == names
    with pytest.raises(ValueError, match="2 tensors"):
        service.end_weight_update()
    service.update_weights_from_named_tensors(only(newer, *names), verify=roots(newer))
    commit = service.end_weight_update()
    assert commit.session.verified and commit.digest == digest_of(newer) == service.model_digest()


def test_a_tensor_that_was_put_back_does_not_count_in_the_digest(service, model, newer):
    service.commit_in_place("1", source=service.engine.weights.resident_tensors())  # its roots are known now
    service.begin_weight_update(weight_version="5", coverage="partial")
    with pytest.raises(DigestMismatch):
        service.update_weights_from_named_tensors(only(newer, NORM), verify={NORM: "00" * 32})
    commit = service.end_weight_update()
    assert commit.digest == digest_of(model) == service.model_digest()


def test_a_part_of_the_weights_is_taken_back_where_the_pause_of_its_client_expires(service, model, newer):
    before = standing(service)
    service.pause_generation("retract")
    service.update_weights_from_named_tensors(only(newer, EMBED), weight_version="5")
    service.pause_generation("retract", ttl=0.01)
    wait_until(lambda: not service.engine.is_paused)
    state = service.state()["weight_update"]
    assert state["state"] == "rolled_back" and "the pause of its client expired" in state["why"]
    assert standing(service) == before and answer(service) == greedy(model)
    with pytest.raises(SessionError, match="pause generation again"):  # else the rest would be committed alone
        service.update_weights_from_named_tensors(only(newer, NORM), weight_version="5")
    service.pause_generation("retract")
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    service.continue_generation()
    assert standing(service)[:2] == ("5", digest_of(newer))


def test_the_whole_weights_are_committed_where_the_pause_of_their_client_expires(service, newer):
    service.pause_generation("retract")
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    service.pause_generation("retract", ttl=0.01)
    wait_until(lambda: not service.engine.is_paused)
    assert standing(service)[:2] == ("5", digest_of(newer)) and answer(service) == greedy(newer)


@pytest.mark.parametrize("kind", [list, iter])
def test_the_engines_own_tensors_are_read_before_any_of_them_is_written(service, kind):
    own = dict(service.engine.weights.resident_tensors())
    one, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    before = {name: own[name].detach().clone() for name in (one, other)}
    swapped = [(one, own[other].detach()), (other, own[one].detach())]
    if kind is iter:
        with pytest.raises(ValueError, match=f"{one}: it lies in memory of other weights"):
            service.update_weights_from_named_tensors(iter(swapped))
        assert torch.equal(own[one], before[one])
        service.update_weights_from_named_tensors(iter(own.items()), weight_version="5")  # each is itself
    else:
        service.update_weights_from_named_tensors(swapped, weight_version="5")
        assert torch.equal(own[one], before[other]) and torch.equal(own[other], before[one])
