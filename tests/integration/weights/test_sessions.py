"""Updates of an engine's weights: when they are visible, the state after a failure, and which calls wait."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.integration.service import RolloutService
from lockstep.integration.weights.options import UpdateOptions
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import NotIdle, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.errors import DigestMismatch, Poisoned, SessionError, TransferFailed
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec

PATIENCE = 30.0  # seconds; far more than any wait here takes
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def service(model) -> Iterator[RolloutService]:
    config = EngineConfig(kv_cache="32 blocks", max_num_seqs=4)
    service = RolloutService(Engine(copy.deepcopy(model), config))
    with service.engine.model.rollout_phase():
        yield service
        service.close()


@pytest.fixture
def newer(model) -> nn.Module:
    """Make the trainer's model some steps later."""
    return later(model)


def later(model: nn.Module, seed: int = 7) -> nn.Module:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return other


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def only(model: nn.Module, *names: str) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in named(model) if name in names]


def roots(model: nn.Module) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(named(model)).items()}


def digest_of(model: nn.Module) -> str:
    return model_digest(named(model))


def standing(service: RolloutService) -> tuple[object, ...]:
    """Return all facts that identify the engine's weights."""
    engine = service.engine
    return engine.weight_version, engine.weight_digest, engine.epoch, service.model_digest()


def greedy(model: nn.Module, num_tokens: int = 4) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def answer(service: RolloutService) -> tuple[int, ...]:
    return tuple(service.engine.generate([PROMPT], PARAMS)[0].token_ids)


def last_commit(service: RolloutService) -> dict:
    return service.state()["weight_update"]["last_commit"]


def failing(pairs: list[tuple[str, Tensor]], after: int) -> Iterator[tuple[str, Tensor]]:
    yield from pairs[:after]
    raise TransferFailed("the wire broke")


class Slow:
    """Tensors of which the last one comes only when a test releases it."""

    def __init__(self, pairs: list[tuple[str, Tensor]]) -> None:
        self._pairs, self.under_way, self.go_on = pairs, threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._pairs[:-1]
        self.under_way.set()
        assert self.go_on.wait(PATIENCE)
        yield self._pairs[-1]


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


# -- implicit sessions -------------------------------------------------------------------------------------------------


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


def test_all_that_does_not_fit_is_listed_at_once(service):
    before = standing(service)
    wrong = [("no_such", torch.zeros(3)), (NORM, torch.zeros(3)), (EMBED, torch.zeros(256, 64, dtype=torch.int8))]
    with pytest.raises(ValueError) as refused:
        service.update_weights_from_named_tensors(wrong)
    assert all(name in str(refused.value) for name, _ in wrong)
    assert "shape [3], resident [64]" in str(refused.value) and "int8" in str(refused.value)
    assert standing(service) == before


# -- requests that run -------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(service) -> RolloutService:
    service.engine.add(PROMPT, LONG, rid="long")
    for _ in range(3):
        service.engine.step()
    assert service.state()["num_running"] == 1
    return service


def drive(service: RolloutService):
    done = []
    while not done:
        done = service.engine.step()
    return done[0]


@pytest.mark.parametrize("explicit", [False, True])
def test_an_update_is_refused_while_requests_run_and_names_the_remedies(busy, newer, explicit):
    before = standing(busy)
    update = busy.begin_weight_update if explicit else partial(busy.update_weights_from_named_tensors, named(newer))
    with pytest.raises(NotIdle, match=r"1 requests are running.*abort_all_requests.*retract"):
        update()
    assert standing(busy) == before and busy.state()["num_running"] == 1
    assert busy.state()["weight_update"]["state"] == "idle"
    assert drive(busy).weight_version == "default"


def test_a_refused_begin_leaves_the_last_commit_revertible(service, newer):
    service.update_weights_from_named_tensors(named(newer), weight_version="5")
    service.engine.add(PROMPT, LONG)
    service.engine.step()
    with pytest.raises(NotIdle):
        service.begin_weight_update()
    service.engine.abort_request(abort_all=True)
    service.engine.step()
    assert service.revert_weight_update() == "default"


def test_an_update_may_abort_everything(busy, newer):
    busy.update_weights_from_named_tensors(named(newer), weight_version="5", abort_all_requests=True)
    [aborted] = busy.engine.step()
    assert aborted.finish_reason.type == "abort" and "weight update" in aborted.finish_reason.message
    assert not busy.engine.is_paused
    assert answer(busy) == greedy(newer)


def test_retracted_requests_go_on_with_the_new_weights_and_stay_paused_until_then(busy, newer):
    busy.engine.pause_generation("retract")
    busy.update_weights_from_named_tensors(named(newer), weight_version="5")
    assert busy.engine.pause_mode == "retract" and busy.state()["weight_update"]["state"] == "open"
    assert busy.engine.step() == []
    busy.continue_generation()
    completion = drive(busy)
    assert [span.version for span in completion.weight_versions] == ["default", "5"]
    assert completion.num_completion_tokens == 60


@pytest.mark.parametrize("explicit", [False, True])
def test_paused_in_place_requests_go_on_only_where_that_was_asked_for(busy, newer, explicit):
    busy.engine.pause_generation("in_place")
    with pytest.raises(NotIdle, match="keep_running"):
        busy.update_weights_from_named_tensors(named(newer))
    if explicit:
        report = busy.begin_weight_update(weight_version="5", keep_running=True)
        assert (report.num_running, report.num_aborted) == (1, 0)
        busy.update_weights_from_named_tensors(named(newer))
        busy.end_weight_update()
    else:
        busy.update_weights_from_named_tensors(named(newer), weight_version="5", keep_running=True)
    assert busy.engine.pause_mode == "in_place"
    busy.continue_generation()
    spans = drive(busy).weight_versions
    found = [(span.version, span.digest, span.start, span.end) for span in spans]
    assert found == [("default", None, 0, 3), ("5", digest_of(newer), 3, 60)]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_client_that_died_leaves_nothing_open(service, model, newer):
    before = standing(service)
    service.engine.start()
    service.begin_weight_update(weight_version="5", lease_s=0.3)
    service.update_weights_from_named_tensors(only(newer, NORM))
    waiting = submit(service.engine.generate, [PROMPT], PARAMS)  # no call ends the session
    assert tuple(soon(waiting)[0].token_ids) == greedy(model)
    assert standing(service) == before
    assert "not ended within" in service.state()["weight_update"]["why"]
    with pytest.raises(SessionError, match="not ended within"):
        service.update_weights_from_named_tensors(named(newer))
    assert standing(service) == before


# -- from several threads ----------------------------------------------------------------------------------------------


def test_the_state_is_answered_while_an_update_is_receiving(service, newer):
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, weight_version="5")
    assert slow.under_way.wait(PATIENCE)
    state = soon(submit(service.state))
    assert state["weight_update"]["state"] == "open" and state["weight_version"] == "default"
    assert soon(submit(service.get_weight_version)) == "default"
    slow.go_on.set()
    soon(updating)


@pytest.mark.parametrize("started", [False, True])
def test_whoever_generates_during_an_update_waits_for_its_commit(service, newer, started):
    if started:
        service.engine.start()
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, weight_version="5")
    assert slow.under_way.wait(PATIENCE)
    generating = submit(service.engine.generate, [PROMPT], PARAMS)
    wait_until(lambda: service.engine.has_work)
    assert not generating.done() and service.state()["metrics"]["num_output_tokens"] == 0
    slow.go_on.set()
    soon(updating)
    [completion] = soon(generating)
    assert (completion.weight_version, tuple(completion.token_ids)) == ("5", greedy(newer))


def test_continue_during_an_update_waits_for_it_and_commits_it(service, newer):
    service.engine.pause_generation()
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, weight_version="5")
    assert slow.under_way.wait(PATIENCE)
    continuing = submit(service.continue_generation)
    slow.go_on.set()
    soon(updating)
    assert soon(continuing).was_paused
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))


def test_an_update_that_cannot_be_committed_yet_makes_requests_wait_for_its_rest(service, newer):
    pieces = _Pieces(service, newer)
    pieces.first_half()
    with pytest.raises(SamplingRefused, match=EMBED):
        service.engine.generate([PROMPT], PARAMS)
    service.engine.start()
    waiting = submit(service.engine.generate, [PROMPT], PARAMS)
    wait_until(lambda: service.state()["num_waiting"] == 1)
    service.engine.pause_generation("retract")  # an engine with requests takes no update
    pieces.second_half()
    service.continue_generation()
    assert soon(waiting)[0].weight_version == "5"


class _Pieces:
    """A tensor that comes in two updates, as a large tensor in buckets does."""

    def __init__(self, service: RolloutService, model: nn.Module) -> None:
        self._service, self._bytes = service, dict(named(model))[EMBED].reshape(-1).view(torch.uint8)
        self._half = self._bytes.numel() // 2

    def first_half(self) -> None:
        self._send(0)

    def second_half(self) -> None:
        self._send(self._half)

    def _send(self, offset: int) -> None:
        def receive(sink: Sink) -> tuple[TensorSpec, ...]:
            sink.write(EMBED, offset, self._bytes[offset : offset + self._half])
            return ()

        self._service.sessions.update("pieces", receive, UpdateOptions("5", PATIENCE))


def test_verbs_of_many_threads_neither_deadlock_nor_mix_versions(service, model):
    """Run updates, requests, pauses and checks at once. An answer of one version must come from the weights of that
    version."""
    versions = {str(seed): later(model, seed) for seed in range(3)}
    expected = {version: greedy(weights) for version, weights in versions.items()} | {"default": greedy(model)}
    service.engine.start()
    stop, pace_s = threading.Event(), 0.003  # without a pause in between the other threads would hardly get a turn
    refused = (NotIdle, SessionError, SamplingRefused, ValueError)  # ValueError: it joined the other session

    def update() -> int:
        num_done = 0
        deadline = time.monotonic() + PATIENCE / 2
        while num_done < 12 and time.monotonic() < deadline:
            for version, weights in versions.items():
                service.engine.pause_generation("retract")
                try:
                    service.update_weights_from_named_tensors(named(weights), weight_version=version)
                    num_done += 1
                except refused:
                    pass
                finally:
                    carry_on_once()
        return num_done

    def carry_on_once() -> bool:
        try:
            service.continue_generation()
        except refused:
            return False
        return True

    def session() -> int:
        num_done = 0
        while not stop.wait(pace_s):
            try:
                service.begin_weight_update(weight_version="1")
            except refused:
                continue
            try:
                service.update_weights_from_named_tensors(named(versions["1"]), verify=roots(versions["1"]))
                service.end_weight_update()
                num_done += 1
            except refused:
                service.abort_weight_update()
        return num_done

    def generate() -> int:
        num_done = 0
        while not stop.is_set():
            [completion] = service.engine.generate([PROMPT], PARAMS)
            num_done += 1
            if len(completion.weight_versions) == 1:
                assert tuple(completion.token_ids) == expected[completion.weight_version]
        return num_done

    def look() -> int:
        num_done = 0
        while not stop.wait(pace_s):
            assert service.state()["weight_update"]["state"] in ("idle", "open", "committed", "rolled_back")
            num_done += 1
        return num_done

    def carry_on() -> int:
        num_done = 0
        while not stop.wait(pace_s):
            num_done += carry_on_once()
        return num_done

    others = [submit(call) for call in (generate, generate, look, carry_on, session)]
    updating = submit(update)
    assert soon(updating) >= 12
    stop.set()
    wait_until(carry_on_once)
    assert all(soon(other) > 0 for other in others[:3]) and all(soon(other) >= 0 for other in others[3:])
    assert service.engine.weight_digest == service.model_digest()
