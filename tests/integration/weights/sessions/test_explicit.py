"""Sessions of updates: when new weights are visible, the state after a failure, and what a lost client leaves."""

from __future__ import annotations

import threading

import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.errors import SamplingRefused
from lockstep.tests.integration.weights.sessions.callers import (
    EMBED,
    HEAD,
    LONG,
    NORM,
    PARAMS,
    PATIENCE,
    PROMPT,
    answer,
    digest_of,
    failing,
    greedy,
    named,
    only,
    roots,
    standing,
)
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import Poisoned, SessionError, TransferFailed
from lockstep.weight_sync.transaction.transaction import WeightTransaction

# -- explicit sessions -------------------------------------------------------------------------------------------------


def test_a_session_shows_its_version_only_at_its_end(service, model, newer):
    service.engine.generate([PROMPT], PARAMS)
    before = standing(service)
    service.begin_weight_update(weight_version="5")
    pairs = named(newer)
    for part in (pairs[:7], pairs[7:]):
        record = service.update_weights_from_named_tensors(part)
        assert (record.explicit, record.verified) == (True, False)
        assert standing(service)[:3] == before[:3]
    service.verify_weight_update(roots(newer))
    assert standing(service)[:3] == before[:3]
    commit = service.end_weight_update()
    assert (commit.version, commit.digest) == ("5", digest_of(newer))
    assert standing(service) == ("5", digest_of(newer), before[2] + 1, digest_of(newer))
    assert (commit.session.coverage, commit.session.verified) == ("full", True)
    assert answer(service) == greedy(newer) != greedy(model)


def test_a_full_session_lists_everything_it_misses_and_can_be_completed(service, newer):
    before = standing(service)
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors([pair for pair in named(newer) if "layers.1" not in pair[0]])
    missing = [name for name, _ in named(newer) if "layers.1" in name]
    with pytest.raises(ValueError, match=f"{len(missing)} tensors") as refused:
        service.end_weight_update()
    assert all(name in str(refused.value) for name in missing)
    assert standing(service)[:3] == before[:3]
    service.update_weights_from_named_tensors(only(newer, *missing))
    assert service.end_weight_update(weight_version="6").version == "6"
    assert service.model_digest() == digest_of(newer)


@pytest.mark.parametrize("how", ["abort", "broken wire"])
def test_a_session_given_up_leaves_no_trace(service, model, newer, how):
    service.engine.generate([PROMPT], PARAMS)
    before, expected = standing(service), greedy(model)
    service.begin_weight_update(weight_version="5")
    if how == "abort":
        service.update_weights_from_named_tensors(named(newer))
        service.abort_weight_update()
    else:
        with pytest.raises(TransferFailed, match="wire"):
            service.update_weights_from_named_tensors(failing(named(newer), after=9))
    assert standing(service) == before
    assert service.state()["weight_update"]["state"] == "rolled_back"
    [completion] = service.engine.generate([PROMPT], PARAMS)
    assert tuple(completion.token_ids) == expected
    assert completion.num_cached_tokens == 32  # the cache is as good as before


@pytest.mark.parametrize("how", ["abort", "broken wire", "lost sender"])
def test_a_stream_keeps_its_bits_when_an_update_in_its_middle_is_given_up(service, newer, how):
    engine = service.engine
    [alone] = engine.generate([PROMPT], LONG)
    engine.start()
    stream = engine.stream(PROMPT, LONG)
    chunks = [next(stream)]
    engine.pause_generation("in_place")
    lease_s = 0.05 if how == "lost sender" else None
    service.begin_weight_update(weight_version="5", keep_running=True, lease_s=lease_s)
    if how == "broken wire":
        with pytest.raises(TransferFailed, match="wire"):
            service.update_weights_from_named_tensors(failing(named(newer), after=9))
    else:
        service.update_weights_from_named_tensors(named(newer))
    if how == "abort":
        service.abort_weight_update()
    wait_until(lambda: service.state()["weight_update"]["state"] == "rolled_back")
    service.continue_generation()
    chunks += stream
    [streamed] = [chunk.completion for chunk in chunks if chunk.completion]
    assert (streamed.token_ids, streamed.logprobs) == (alone.token_ids, alone.logprobs)
    assert [span.version for span in streamed.weight_versions] == [alone.weight_version]


def test_a_commit_flushes_the_cache_and_says_how_many_pins_it_dropped(service, newer):
    service.engine.generate([PROMPT], PARAMS)
    assert service.engine.pin_prefix(PROMPT).num_pinned == 2
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    commit = service.end_weight_update()
    assert (commit.num_blocks_dropped, commit.num_unpinned) == (2, 2)
    assert service.state()["num_pins"] == service.state()["num_cached_blocks"] == 0
    assert service.engine.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_while_a_session_is_open_nothing_is_sampled_and_generation_cannot_continue(service, newer):
    service.begin_weight_update(weight_version="5")
    with pytest.raises(SamplingRefused, match="end_weight_update"):
        service.engine.generate([PROMPT], PARAMS)
    with pytest.raises(SessionError, match="open"):
        service.continue_generation()
    with pytest.raises(SessionError, match="already open"):
        service.begin_weight_update()
    service.abort_weight_update()
    assert not service.continue_generation().was_paused
    for verb in (service.end_weight_update, service.abort_weight_update, service.revert_weight_update):
        with pytest.raises(SessionError):
            verb()


def test_requests_that_come_during_a_session_wait_for_it_and_do_not_hinder_it(service, newer):
    service.engine.start()
    service.begin_weight_update(weight_version="5")
    waiting = submit(service.engine.generate, [PROMPT], PARAMS)
    wait_until(lambda: service.state()["num_waiting"] == 1)
    service.update_weights_from_named_tensors(named(newer))
    assert not waiting.done()
    service.end_weight_update()
    [completion] = soon(waiting)
    assert (tuple(completion.token_ids), completion.weight_version) == (greedy(newer), "5")


def test_a_reverted_commit_leaves_the_weights_before_it(service, model, newer):
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    service.end_weight_update()
    assert service.revert_weight_update() == "default"
    assert service.model_digest() == service.finish_digest() == digest_of(model)
    assert answer(service) == greedy(model)
    with pytest.raises(SessionError, match="no commit"):
        service.revert_weight_update()


def test_a_revert_is_no_write_without_a_commit(service, model, newer, caplog):
    service.commit_in_place("4", source=service.engine.model.module.named_parameters())
    assert answer(service) == greedy(model)
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    service.end_weight_update()
    assert answer(service) == greedy(newer)
    service.revert_weight_update()
    assert answer(service) == greedy(model) and service.engine.weight_digest == digest_of(model)
    assert "written or moved" not in caplog.text


def test_a_revert_that_fails_leaves_the_refusal_of_one_that_still_runs(service, newer, monkeypatch):
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    service.end_weight_update()
    entered, leave, take_back = threading.Event(), threading.Event(), WeightTransaction.revert

    def slow(self) -> None:
        entered.set()
        assert leave.wait(PATIENCE)
        take_back(self)

    monkeypatch.setattr(WeightTransaction, "revert", slow)
    monkeypatch.setattr(service.sessions._manager._lock, "timeout_s", 0.05)
    running = submit(service.revert_weight_update)
    assert entered.wait(PATIENCE)
    with pytest.raises(SessionError, match="waited"):
        service.revert_weight_update()
    assert service.engine.refusal == "a weight update is being reverted"
    leave.set()
    assert soon(running) == "default" and service.engine.refusal is None


def test_a_commit_whose_undo_was_released_stands(service, newer):
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors(named(newer))
    service.end_weight_update()
    service.release_weight_undo()
    with pytest.raises(SessionError, match="not kept"):
        service.revert_weight_update()
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))


def test_a_digest_asked_for_later_is_owed_until_the_next_write(service, newer):
    service.begin_weight_update(weight_version="5", digest="later")
    service.update_weights_from_named_tensors(named(newer))
    assert service.end_weight_update().digest is None
    assert service.engine.weight_digest is None and service.state()["owes_digest"]
    service.begin_weight_update(weight_version="6")
    assert service.engine.weight_digest == digest_of(newer) and not service.state()["owes_digest"]
    service.abort_weight_update()
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))


# -- nothing to go back to ---------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(service, newer) -> RolloutService:
    service.begin_weight_update(weight_version="5", undo="none")
    with pytest.raises(TransferFailed):
        service.update_weights_from_named_tensors(failing(named(newer), after=9))
    return service


def test_without_undo_a_failure_poisons(poisoned, newer):
    assert poisoned.state()["weight_update"]["state"] == "poisoned"
    assert poisoned.engine.weight_version == "default"
    with pytest.raises(SamplingRefused, match=r"poisoned.*wire broke.*verified"):
        poisoned.engine.generate([PROMPT], PARAMS)
    poisoned.engine.pause_generation()
    with pytest.raises(SamplingRefused, match=r"poisoned.*wire broke"):
        poisoned.continue_generation()
    assert poisoned.engine.is_paused
    with pytest.raises(Poisoned, match="full"):
        poisoned.update_weights_from_named_tensors(named(newer))
    with pytest.raises(Poisoned):
        poisoned.begin_weight_update(coverage="partial")


def test_a_mismatch_that_is_found_without_undo_refuses_sampling_at_once(service, newer, model):
    service.begin_weight_update(weight_version="5", undo="none")
    service.update_weights_from_named_tensors(named(newer))
    with pytest.raises(Poisoned, match=f"{NORM} cannot be restored"):
        service.verify_weight_update({**roots(newer), NORM: roots(model)[NORM]})
    assert service.state()["weight_update"]["state"] == "poisoned"
    with pytest.raises(SamplingRefused, match=r"poisoned.*verified"):
        service.engine.generate([PROMPT], PARAMS)
    service.begin_weight_update(weight_version="6")
    service.update_weights_from_named_tensors(named(newer), verify=roots(newer))
    service.end_weight_update()
    assert answer(service) == greedy(newer)


def test_a_verified_full_update_heals_and_an_unverified_one_does_not(poisoned, newer):
    poisoned.begin_weight_update(weight_version="6")
    poisoned.update_weights_from_named_tensors(named(newer))
    with pytest.raises(Poisoned, match=NORM):
        poisoned.end_weight_update()
    poisoned.verify_weight_update(roots(newer))
    assert poisoned.end_weight_update().digest == digest_of(newer)
    assert answer(poisoned) == greedy(newer)


def test_requests_of_a_started_engine_wait_while_it_is_poisoned(poisoned, newer):
    poisoned.engine.start()
    waiting = submit(poisoned.engine.generate, [PROMPT], PARAMS)
    wait_until(lambda: poisoned.state()["num_waiting"] == 1)
    poisoned.engine.pause_generation("retract")
    poisoned.begin_weight_update(weight_version="6")
    poisoned.update_weights_from_named_tensors(named(newer), verify=roots(newer))
    poisoned.end_weight_update()
    assert not waiting.done()
    poisoned.continue_generation()
    assert tuple(soon(waiting)[0].token_ids) == greedy(newer)


def test_a_healing_that_is_given_up_leaves_it_poisoned(poisoned, newer):
    poisoned.begin_weight_update(weight_version="6")
    poisoned.update_weights_from_named_tensors(named(newer))
    poisoned.abort_weight_update()
    assert poisoned.state()["weight_update"]["state"] == "poisoned"
    with pytest.raises(SamplingRefused, match="poisoned"):
        poisoned.engine.generate([PROMPT], PARAMS)


# -- which tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["both", "one", "the other"])
def test_tied_tensors_may_come_under_either_name_or_both(service, newer, sent):
    pairs = dict(named(newer))
    if sent != "one":
        pairs[HEAD] = pairs[EMBED]
    if sent == "the other":
        del pairs[EMBED]
    service.begin_weight_update(weight_version="5")
    digests = {name: root.hex() for name, root in tensor_roots(pairs.items()).items()}
    service.update_weights_from_named_tensors(list(pairs.items()), verify=digests)
    assert service.end_weight_update().digest == digest_of(newer)


def test_different_bytes_for_tied_tensors_are_refused(service, model, newer):
    before = standing(service)
    service.begin_weight_update()
    with pytest.raises(ValueError, match="one tensor here"):
        service.update_weights_from_named_tensors([*named(newer), (HEAD, model.lm_head.weight.detach())])
    assert standing(service) == before


def test_buffers_may_be_sent_and_may_be_left_out(service, newer):
    [(name, inv_freq)] = [(n, b) for n, b in service.engine.model.buffers() if n.endswith("rotary_emb.inv_freq")]
    kept = inv_freq.clone()
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_named_tensors([*named(newer), (name, kept * 1.0)])
    commit = service.end_weight_update()
    assert torch.equal(dict(service.engine.model.buffers())[name], kept)
    assert commit.digest == digest_of(newer)  # of the parameters only


@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_a_buffer_that_the_digest_does_not_cover_keeps_its_bytes(service, newer, coverage):
    [(name, inv_freq)] = [(n, b) for n, b in service.engine.model.buffers() if n.endswith("rotary_emb.inv_freq")]
    kept, before = inv_freq.clone(), standing(service)
    service.begin_weight_update(weight_version="5", coverage=coverage)
    with pytest.raises(ValueError, match=f"{name}: no part of checkpoints"):
        service.update_weights_from_named_tensors([(name, kept * 7 + 1)])
    assert service.state()["weight_update"]["state"] == "open"  # nothing was written
    service.abort_weight_update()
    assert torch.equal(inv_freq, kept) and standing(service) == before


def test_all_that_does_not_fit_is_listed_at_once(service):
    before = standing(service)
    wrong = [("no_such", torch.zeros(3)), (NORM, torch.zeros(3)), (EMBED, torch.zeros(256, 64, dtype=torch.int8))]
    with pytest.raises(ValueError) as refused:
        service.update_weights_from_named_tensors(wrong)
    assert all(name in str(refused.value) for name, _ in wrong)
    assert "shape [3], resident [64]" in str(refused.value) and "int8" in str(refused.value)
    assert standing(service) == before


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_client_that_died_leaves_nothing_open(service, model, newer):
    before = standing(service)
    service.engine.start()
    service.begin_weight_update(weight_version="5", lease_s=0.3)
    service.update_weights_from_named_tensors(only(newer, NORM))
    waiting = submit(service.engine.generate, [PROMPT], PARAMS)  # no call ends the session
    assert tuple(soon(waiting)[0].token_ids) == greedy(model)
    assert standing(service) == before
    assert "silent for" in service.state()["weight_update"]["why"]
    with pytest.raises(SessionError, match="silent for"):
        service.update_weights_from_named_tensors(named(newer))
    assert standing(service) == before


def test_the_version_of_a_clients_session_is_its_own(service, newer):
    service.begin_weight_update(weight_version="17", client="push A")
    service.update_weights_from_named_tensors(named(newer), client="push A")
    service.engine.add(PROMPT, PARAMS)
    for client in (None, "push B"):
        with pytest.raises(SessionError, match="the open weight-update session is that of push A"):
            service.update_weight_version("99", client=client)
    assert service.engine.state()["num_waiting"] == 1  # no request was aborted for it
    assert service.end_weight_update(client="push A").version == "17"
    service.begin_weight_update(weight_version="18", abort_all_requests=True, client="push B")
    service.update_weights_from_named_tensors(named(newer), client="push B")
    service.update_weight_version("19", client="push B")
    assert service.end_weight_update(client="push B").version == "19"


def test_a_session_without_a_client_is_named_by_any_caller_without_one(service, newer):
    """As trainers of SGLang do right before the end."""
    service.begin_weight_update()
    service.update_weights_from_named_tensors(named(newer), weight_version="4")
    with pytest.raises(SessionError, match="of a client without a name"):
        service.update_weight_version("5", abort_all_requests=False, client="push A")
    service.update_weight_version("6", abort_all_requests=False)
    assert service.end_weight_update().version == "6"
    service.update_weight_version("7")
    assert service.get_weight_version() == "7"
