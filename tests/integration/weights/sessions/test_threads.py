"""Updates while other threads generate, pause, continue and look."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.integration.weights.options import UpdateOptions
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import DeadlineExceeded, EngineStopped, NotIdle, SamplingRefused
from lockstep.tests.integration.weights.sessions.callers import (
    EMBED,
    PARAMS,
    PATIENCE,
    PROMPT,
    Slow,
    digest_of,
    greedy,
    later,
    named,
    roots,
    standing,
)
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.weight_sync.errors import SessionBusy, SessionError
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import TensorSpec


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


@pytest.mark.parametrize(
    "call",
    [
        lambda service: service.begin_weight_update(timeout_s=0.05),
        lambda service: service.abort_weight_update(timeout_s=0.05),
        lambda service: service.revert_weight_update(timeout_s=0.05),
        lambda service: service.end_weight_update(timeout_s=0.05),
        lambda service: service.continue_generation(timeout_s=0.05),
        lambda service: service.update_weight_version("6", timeout_s=0.05),
    ],
)
def test_a_call_that_waits_too_long_for_an_update_does_not_run_after_it(service, newer, call):
    service.engine.add(PROMPT, PARAMS)
    service.engine.step()
    service.pause_generation("in_place")
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, weight_version="5", keep_running=True)
    assert slow.under_way.wait(PATIENCE)
    with pytest.raises(SessionBusy, match="update from this process"):
        call(service)
    slow.go_on.set()
    soon(updating)
    state = service.state()
    assert (state["weight_update"]["state"], state["weight_update"]["explicit"], state["num_running"]) == (
        "open", False, 1,
    )  # fmt: skip
    assert state["paused"] and state["weight_version"] == "default"
    service.continue_generation()
    assert standing(service)[:2] == ("5", digest_of(newer))


def test_an_update_does_not_begin_after_its_deadline(service, newer, monkeypatch):
    manager, began = service.sessions._manager, []
    make = service.sessions._host.make_transaction

    def late(*given: object) -> object:
        wait_until(lambda: time.monotonic() > began[0] + 0.02)
        return make(*given)

    monkeypatch.setattr(service.sessions._host, "make_transaction", late)
    for update in (service.begin_weight_update, partial(service.update_weights_from_named_tensors, named(newer))):
        began[:] = [time.monotonic()]
        with pytest.raises(DeadlineExceeded, match="will not run"):
            update(timeout_s=0.01)
        assert manager.state()["state"] == "idle" and service.engine.refusal is None


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


def test_a_service_that_an_update_keeps_busy_still_closes_its_engine(model, newer):
    engine = Engine(copy.deepcopy(model), EngineConfig(kv_cache="32 blocks", max_num_seqs=4))
    service = RolloutService(engine, ServiceConfig(weight_timeout_s=0.05))
    engine.start()
    slow = Slow(named(newer))
    updating = submit(service.update_weights_from_named_tensors, slow, timeout_s=PATIENCE)
    assert slow.under_way.wait(PATIENCE)
    with pytest.raises(SessionBusy, match="update from this process"):
        service.close()
    assert not engine.is_started
    with pytest.raises(EngineStopped):
        engine.generate([PROMPT], PARAMS)
    slow.go_on.set()
    soon(updating)
    service.close()  # and takes back the update
    assert service.state()["weight_update"]["state"] == "rolled_back"
    assert service.model_digest() == digest_of(model)


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


_REFUSED = (NotIdle, SessionError, SamplingRefused, ValueError)  # ValueError: it joined the other session
_PACE_S = 0.003  # without a pause in between the other threads would hardly get a turn


class _Crowd:
    """The calls of many threads at once; each returns how often it succeeded."""

    def __init__(self, service: RolloutService, versions: dict[str, nn.Module], expected: dict[str, tuple]) -> None:
        """expected: the greedy tokens of each version."""
        self.service, self.versions, self.expected = service, versions, expected
        self.stop = threading.Event()

    def update(self) -> int:
        num_done = 0
        deadline = time.monotonic() + PATIENCE / 2
        while num_done < 12 and time.monotonic() < deadline:
            for version, weights in self.versions.items():
                self.service.engine.pause_generation("retract")
                try:
                    self.service.update_weights_from_named_tensors(named(weights), weight_version=version)
                    num_done += 1
                except _REFUSED:
                    pass
                finally:
                    self.carry_on_once()
        return num_done

    def carry_on_once(self) -> bool:
        try:
            self.service.continue_generation()
        except _REFUSED:
            return False
        return True

    def session(self) -> int:
        num_done = 0
        while not self.stop.wait(_PACE_S):
            try:
                self.service.begin_weight_update(weight_version="1")
            except _REFUSED:
                continue
            try:
                self.service.update_weights_from_named_tensors(
                    named(self.versions["1"]), verify=roots(self.versions["1"])
                )
                self.service.end_weight_update()
                num_done += 1
            except _REFUSED:
                self.service.abort_weight_update()
        return num_done

    def generate(self) -> int:
        num_done = 0
        while not self.stop.is_set():
            [completion] = self.service.engine.generate([PROMPT], PARAMS)
            num_done += 1
            if len(completion.weight_versions) == 1:
                assert tuple(completion.token_ids) == self.expected[completion.weight_version]
        return num_done

    def look(self) -> int:
        num_done = 0
        while not self.stop.wait(_PACE_S):
            assert self.service.state()["weight_update"]["state"] in ("idle", "open", "committed", "rolled_back")
            num_done += 1
        return num_done

    def carry_on(self) -> int:
        num_done = 0
        while not self.stop.wait(_PACE_S):
            num_done += self.carry_on_once()
        return num_done


def test_verbs_of_many_threads_neither_deadlock_nor_mix_versions(service, model):
    """Run updates, requests, pauses and checks at once. An answer of one version must come from the weights of that
    version."""
    versions = {str(seed): later(model, seed) for seed in range(3)}
    expected = {version: greedy(weights) for version, weights in versions.items()} | {"default": greedy(model)}
    service.engine.start()
    service.name_weights()  # they are the last ones too where each update is taken back by another thread
    crowd = _Crowd(service, versions, expected)
    others = [submit(call) for call in (crowd.generate, crowd.generate, crowd.look, crowd.carry_on, crowd.session)]
    updating = submit(crowd.update)
    assert soon(updating) >= 12
    crowd.stop.set()
    wait_until(crowd.carry_on_once)
    assert all(soon(other) > 0 for other in others[:3]) and all(soon(other) >= 0 for other in others[3:])
    assert service.engine.weight_digest == service.model_digest()
