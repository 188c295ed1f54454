"""Weights without a digest are named for receipts: with the digest of the version's own bytes, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.integration.replay.present import PresentWeights
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.integration.weights.sessions.callers import (
    PARAMS,
    PROMPT,
    Slow,
    digest_of,
    named,
    standing,
)
from lockstep.tests.support.callers import soon, submit
from lockstep.weight_sync.errors import SessionError


@pytest.fixture
def owned(model, tmp_path) -> Iterator[RolloutService]:
    """Make a service whose engine owns the memory of its weights."""
    model.save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


def test_weights_are_not_named_while_a_session_has_written_a_part_of_them(service, model, newer):
    service.begin_weight_update(weight_version="1")
    service.update_weights_from_named_tensors(named(newer)[:3])
    assert service.name_weights() is None
    with pytest.raises(SessionError, match="a weight-update session is open"):
        PresentWeights(service)
    service.abort_weight_update()
    assert service.engine.weight_digest is None
    assert service.name_weights() == digest_of(model) == PresentWeights(service).digest


def test_weights_are_not_named_while_an_implicit_session_is_open(service, newer):
    service.update_weights_from_named_tensors(named(newer), weight_version="1")
    assert service.name_weights() is None
    service.commit_implicit_update()
    assert service.name_weights() == digest_of(newer)


def test_a_look_at_written_weights_leaves_their_commit_as_it_is(service, newer):
    """Sequences that keep the KV of older weights say so, whatever was asked before the commit."""
    service.engine.add(PROMPT, PARAMS)
    service.engine.step()
    service.pause_generation("in_place")
    service.begin_weight_update(weight_version="1", keep_running=True)
    service.update_weights_from_named_tensors(named(newer))
    assert service.name_weights() is None
    service.end_weight_update()
    service.continue_generation()
    completions = []
    while not completions:
        completions = service.engine.step()
    assert completions[0].kv_starts


def test_a_request_does_not_wait_for_an_update_under_way(service, newer):
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, weight_version="1")
    assert slow.under_way.wait(30)
    assert soon(submit(service.name_weights)) is None
    slow.go_on.set()
    soon(updating)


@pytest.mark.parametrize("by", ["update", "caller"])
def test_a_commit_while_weights_are_named_does_not_get_the_former_digest(service, newer, by):
    weights, updating = service.engine.weights, []
    set_digest = weights.set_weight_digest

    def update() -> None:
        service.update_weights_from_named_tensors(named(newer), weight_version="1")
        service.commit_implicit_update()

    def set_late(*args: object, **options: object) -> bool:
        weights.set_weight_digest = set_digest
        if by == "update":  # it waits until the weights have their name
            updating.append(submit(update))
        else:
            weights.commit_weights("1", None)
        return set_digest(*args, **options)

    weights.set_weight_digest = set_late
    service.name_weights()
    for call in updating:
        soon(call)
    assert standing(service)[:2] == ("1", digest_of(newer) if by == "update" else None)


def test_undefined_weights_are_not_named(owned, model, newer):
    digest = owned.name_weights()
    assert digest == digest_of(model)
    owned.release_memory_occupation(["weights", "kv_cache"])
    assert owned.name_weights() is None
    owned.resume_memory_occupation(["weights"])
    assert owned.name_weights() is None and owned.engine.weight_digest is None
    with pytest.raises(SessionError, match="weights hold nothing"):
        PresentWeights(owned)
    owned.update_weights_from_named_tensors(named(newer), weight_version="1")
    owned.resume_memory_occupation(["kv_cache"])
    assert owned.name_weights() == digest_of(newer)


def test_weights_that_a_trainer_has_written_are_not_named_before_their_commit(service, newer):
    module = service.engine.model.module
    with service.optimizer_step(), torch.no_grad():
        for parameter, (_, value) in zip(module.parameters(), named(newer), strict=True):
            parameter.copy_(value)
            assert service.name_weights() is None
    assert service.name_weights() is None
    service.commit_in_place("1", source=module.named_parameters(), digest="later")
    assert service.name_weights() == digest_of(newer)


def test_weights_that_have_a_digest_are_not_digested_again(service, model):
    service.name_weights()
    service.sessions.present_digest = None
    assert service.name_weights() == digest_of(model)
