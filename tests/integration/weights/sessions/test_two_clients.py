"""Calls of several clients, one of which comes between two steps of another one's."""

from __future__ import annotations

import pytest

from lockstep.integration.service import RolloutService
from lockstep.rollout.loop.between_steps import BetweenSteps
from lockstep.tests.integration.weights.sessions.callers import digest_of, later, named, standing
from lockstep.tests.support.callers import soon, submit
from lockstep.weight_sync.errors import SessionBusy, SessionError
from lockstep.weight_sync.transaction.session import SessionManager


def push(service: RolloutService, model, version: str, client: str):
    service.begin_weight_update(weight_version=version, client=client)
    service.update_weights_from_named_tensors(named(model), client=client)
    return service.end_weight_update(client=client)


def test_the_end_of_an_update_tells_of_its_own_commit(service, model, newer, monkeypatch):
    newest, commit = later(model, 8), SessionManager.commit

    def slow(self, *given, **options):
        record = commit(self, *given, **options)
        if record.version == "5":
            push(service, newest, "6", "two")
        return record

    monkeypatch.setattr(SessionManager, "commit", slow)
    ended = push(service, newer, "5", "one")
    assert (ended.version, ended.digest) == ("5", digest_of(newer))
    assert standing(service)[:2] == ("6", digest_of(newest))


def test_a_revert_is_published_before_another_update_begins(service, model, newer, monkeypatch):
    service.finish_digest()
    push(service, newer, "5", "one")
    host, told = service.sessions._host, []
    unpublish = host.unpublish

    def slow() -> None:
        with pytest.raises(SessionBusy):
            soon(submit(service.begin_weight_update, client="two", timeout_s=0.01))
        told.append(service.engine.refusal)
        unpublish()

    monkeypatch.setattr(host, "unpublish", slow)
    assert service.revert_weight_update(client="one") == "default"
    assert told == ["a weight update is being reverted"] and service.engine.refusal is None
    assert service.model_digest() == digest_of(model)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_refused_end_does_not_decide_what_the_next_commit_does_with_begun_requests(
    service, newer, monkeypatch, is_open
):
    seen, commit = [], BetweenSteps.commit_weights

    def noted(self, version, digest, lift, refuse, in_flight=None, *others):
        seen.append(in_flight)
        return commit(self, version, digest, lift, refuse, in_flight, *others)

    monkeypatch.setattr(BetweenSteps, "commit_weights", noted)
    if is_open:
        service.begin_weight_update(weight_version="5")
        with pytest.raises(ValueError, match="not wholly written"):
            service.end_weight_update(in_flight="verify")
    else:
        with pytest.raises(SessionError, match="no weight-update session is open"):
            service.end_weight_update(in_flight="verify")
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    service.end_weight_update() if is_open else service.continue_generation()
    assert seen == [None] and service.engine.weight_version == "5"
