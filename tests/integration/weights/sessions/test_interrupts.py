"""Interrupts of the main thread, as at Ctrl-C, in the calls of a session: each has its effect as a whole or none."""

from __future__ import annotations

import pytest

from lockstep.integration.service import RolloutService
from lockstep.tests.integration.weights.sessions.callers import answer, digest_of, greedy, interrupt, named, standing


def push(service: RolloutService, model, version: str) -> None:
    service.begin_weight_update(weight_version=version)
    service.update_weights_from_named_tensors(named(model))
    service.end_weight_update()


def test_an_interrupted_commit_has_its_version_its_digest_and_its_bytes(service, newer):
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    interrupt(service, "commit_weights", service.end_weight_update)
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))
    assert service.state()["weight_update"]["state"] == "committed"
    assert answer(service) == greedy(newer)
    assert service.revert_weight_update() == "default"


def test_an_interrupted_implicit_commit_too(service, newer):
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    interrupt(service, "commit_weights", service.continue_generation)
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer)) and answer(service) == greedy(newer)


def test_an_interrupted_begin_opens_no_session_and_stops_nothing(service, model, newer):
    interrupt(service, "hold", service.begin_weight_update)
    assert service.state()["weight_update"]["state"] != "open" and service.engine.refusal is None
    assert answer(service) == greedy(model)
    push(service, newer, "5")
    assert answer(service) == greedy(newer)


def test_an_interrupted_update_outside_a_session_stops_nothing(service, model, newer):
    interrupt(service, "hold", lambda: service.update_weights_from_named_tensors(named(newer)))
    assert service.state()["weight_update"]["state"] != "open" and service.engine.refusal is None
    assert answer(service) == greedy(model)


@pytest.mark.parametrize(("command", "version"), [("hold", "5"), ("commit_weights", "default")])
def test_an_interrupted_revert_is_whole_or_none_and_stops_nothing(service, model, newer, command, version):
    service.finish_digest()
    push(service, newer, "5")
    interrupt(service, command, service.revert_weight_update)
    assert service.engine.refusal is None and service.engine.weight_version == version
    now = newer if version == "5" else model
    assert service.model_digest() == digest_of(now) and answer(service) == greedy(now)
    push(service, newer, "6")
    assert standing(service)[:2] == ("6", digest_of(newer)) and answer(service) == greedy(newer)
