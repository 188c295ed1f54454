"""Weights that others write in a session, or between commits: no digest and no KV is of other bytes than it says."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.loop.between_steps import BetweenSteps
from lockstep.tests.integration.weights.sessions.callers import (
    EMBED,
    NORM,
    PARAMS,
    PATIENCE,
    PROMPT,
    answer,
    digest_of,
    greedy,
    named,
    only,
)
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.weight_sync.errors import DigestMismatch, SessionError
from lockstep.weight_sync.transaction.session import SessionManager


def change(service: RolloutService, name: str = NORM) -> None:
    """Write a weight of the engine's module as a trainer does that does not know of sessions."""
    with torch.no_grad():
        service.engine.model.module.get_parameter(name).mul_(1.5)


def now(service: RolloutService) -> str:
    return digest_of(service.engine.model.module)


def commit_all(service: RolloutService, newer, version: str = "1") -> None:
    service.begin_weight_update(weight_version=version)
    service.update_weights_from_named_tensors(named(newer))
    service.end_weight_update()
    answer(service)


def test_an_aborted_session_does_not_give_its_digest_to_what_others_wrote_meanwhile(service, newer):
    commit_all(service, newer)
    service.begin_weight_update(coverage="partial")
    service.update_weights_from_named_tensors(only(newer, EMBED))
    change(service)
    service.abort_weight_update()
    assert service.engine.weight_digest is None
    [found] = service.engine.generate([PROMPT], PARAMS)
    assert (found.weight_digest, found.num_cached_tokens) == (None, 0)
    assert tuple(found.token_ids) == greedy(service.engine.model.module)


@pytest.mark.parametrize("how", ["counted by torch", "through .data"])
@pytest.mark.parametrize("is_open", [True, False], ids=["session", "update without a session"])
def test_what_others_wrote_before_the_session_did_has_no_digest_of_before(service, newer, how, is_open):
    """The undo data of such a tensor holds their write, since the session keeps what it overwrites."""
    commit_all(service, newer)
    if is_open:
        service.begin_weight_update(coverage="partial")
    else:
        service.update_weights_from_named_tensors(only(newer, EMBED))
    with torch.no_grad():
        weight = service.engine.model.module.get_parameter(NORM)
        (weight.data if how == "through .data" else weight).mul_(1.5)
    wrong = {NORM: "0" * 64} if not is_open else {}
    update = partial(service.update_weights_from_named_tensors, only(newer, NORM), verify=wrong)
    if is_open:
        update()
        service.abort_weight_update()
    else:
        with pytest.raises(DigestMismatch):
            update()
    assert service.engine.weight_digest is None
    [found] = service.engine.generate([PROMPT], PARAMS)
    assert (found.weight_digest, found.num_cached_tokens) == (None, 0)
    assert tuple(found.token_ids) == greedy(service.engine.model.module)


def test_nor_has_it_where_the_session_restored_it_and_committed_others(service, newer):
    commit_all(service, newer)
    service.begin_weight_update(coverage="partial")
    change(service)
    with pytest.raises(DigestMismatch):
        service.update_weights_from_named_tensors(only(newer, NORM), verify={NORM: "0" * 64})
    service.update_weights_from_named_tensors([(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))])
    assert service.end_weight_update().digest == now(service)


@pytest.mark.parametrize("name", [NORM, EMBED], ids=["which it did not write", "which it wrote afterwards"])
def test_a_revert_of_a_session_in_which_others_wrote_claims_no_digest_of_before(service, newer, name):
    commit_all(service, newer)
    service.begin_weight_update(coverage="partial", weight_version="2")
    change(service, name)
    service.update_weights_from_named_tensors([(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))])
    service.end_weight_update()
    assert service.revert_weight_update() == "1"
    assert service.engine.weight_digest is None
    assert service.finish_digest() == now(service) != digest_of(newer)


def test_an_aborted_session_without_other_writes_keeps_digest_and_kv(service, newer):
    commit_all(service, newer)
    service.begin_weight_update(coverage="partial")
    service.update_weights_from_named_tensors([(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))])
    service.abort_weight_update()
    assert service.engine.weight_digest == now(service) == digest_of(newer)
    assert service.engine.generate([PROMPT], PARAMS)[0].num_cached_tokens == 32


@pytest.mark.parametrize("digest", ["now", "later"])
def test_a_partial_session_has_the_digest_of_what_others_wrote_meanwhile_too(service, newer, digest):
    commit_all(service, newer)
    service.begin_weight_update(coverage="partial", digest=digest)
    service.update_weights_from_named_tensors([(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))])
    change(service)
    commit = service.end_weight_update()
    assert (commit.digest, service.finish_digest()) == (now(service) if digest == "now" else None, now(service))
    assert service.engine.weight_digest == now(service)


def test_so_has_an_update_without_a_session(service, newer):
    commit_all(service, newer)
    service.update_weights_from_named_tensors([(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))])
    change(service)
    assert answer(service) == greedy(service.engine.model.module)
    assert service.engine.weight_digest == now(service)


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed before", "noticed by the revert"])
def test_a_revert_leaves_what_others_wrote_and_claims_no_digest_of_before(service, newer, is_noticed):
    commit_all(service, newer)
    service.update_weights_from_named_tensors(
        [(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))], weight_version="2"
    )
    answer(service)
    change(service)
    if is_noticed:
        service.engine.weights.hold_for_update(refusal=("look", "a look at the weights"))
        service.engine.weights.allow_sampling("look")
        assert service.engine.weight_digest is None
    assert service.revert_weight_update() == "1"
    assert service.engine.weight_digest is None
    assert service.finish_digest() == now(service) != digest_of(newer)


def test_weights_committed_at_the_engine_itself_have_no_root_of_before(service, newer):
    commit_all(service, newer)
    change(service)
    service.engine.weights.commit_weights("2", now(service))
    service.update_weights_from_named_tensors(
        [(EMBED, torch.zeros_like(newer.get_parameter(EMBED)))], weight_version="3"
    )
    answer(service)
    assert (service.engine.weight_version, service.engine.weight_digest) == ("3", now(service))


def test_another_call_does_not_change_what_a_commit_does_with_begun_requests(service, newer, monkeypatch):
    """A second end waits for the first, which draws begun requests again."""
    service.begin_weight_update(weight_version="1")
    service.update_weights_from_named_tensors(named(newer))
    entered, leave, seen, ended = threading.Event(), threading.Event(), [], []
    prepare, commit, end = service.sessions._host.prepare_commit, BetweenSteps.commit_weights, SessionManager.commit

    def slow(record) -> None:
        entered.set()
        assert leave.wait(PATIENCE)
        prepare(record)

    def noted(self, version, digest, lift, refuse, in_flight=None, *others):
        seen.append(in_flight)
        return commit(self, version, digest, lift, refuse, in_flight, *others)

    def counted(self, *args, **options):
        ended.append(args)
        return end(self, *args, **options)

    monkeypatch.setattr(SessionManager, "commit", counted)
    monkeypatch.setattr(service.sessions._host, "prepare_commit", slow)
    monkeypatch.setattr(BetweenSteps, "commit_weights", noted)
    first = submit(lambda: service.end_weight_update(in_flight="verify"))
    assert entered.wait(PATIENCE)
    second = submit(service.end_weight_update)
    wait_until(lambda: len(ended) == 2, what="the second call")
    leave.set()
    assert soon(first).version == "1" and seen == ["verify"]
    with pytest.raises(SessionError, match="no weight-update session is open"):
        soon(second)


def test_a_folder_that_an_aborted_session_read_is_not_where_later_weights_come_from(service, newer, tmp_path):
    newer.save_pretrained(tmp_path)
    service.begin_weight_update(weight_version="1")
    service.update_weights_from_disk(tmp_path)
    service.abort_weight_update()
    assert service.sessions._host.folder is None
    commit_all(service, newer, "2")
    assert service.sessions._host.folder is None
    service.update_weights_from_disk(tmp_path, weight_version="3")
    answer(service)
    assert service.sessions._host.folder == (str(tmp_path), service.engine.epoch)
