"""Tests of long work in slices."""

from __future__ import annotations

import threading

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control import giving_way as module
from lockstep.rollout.control.giving_way import give_way, giving_way
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams


class Listener:
    """Takes nothing."""

    def on_chunk(self, chunk) -> None:
        pass

    def on_failure(self, error) -> None:
        pass


def test_others_go_first_after_each_slice_and_only_inside_the_block(monkeypatch):
    waits: list[int] = []
    give_way()
    with giving_way(lambda: waits.append(1)):
        give_way()
        assert len(waits) <= 1, "a slice takes a millisecond"
        del waits[:]
        monkeypatch.setattr(module, "_SLICE_S", 0.0)
        give_way()
        other = threading.Thread(target=give_way)
        other.start()
        other.join()
        assert len(waits) == 1, "another thread has no block"
    give_way()
    assert len(waits) == 1
    with pytest.raises(ZeroDivisionError), giving_way(lambda: waits.append(1)):
        raise ZeroDivisionError
    give_way()
    assert len(waits) == 1


def test_the_prompts_and_samples_of_one_request_are_made_in_slices(make_model, monkeypatch):
    """Thousands are made on a thread, beside the event loop of a server."""
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="80 blocks"))
    listener, waits = Listener(), []
    monkeypatch.setattr(module, "_SLICE_S", 0.0)

    def wait() -> None:
        waits.append(engine.driver.lock._is_owned() or engine.driver.inbox.lock.locked())

    with giving_way(wait):
        ids = engine.requests.submit([[1, 2]] * 5, [SamplingParams(n=20)] * 5, listener, streamed=False)
    assert sum(map(len, ids)) == 100
    assert len(waits) == 5 + 100
    assert not any(waits), "others need these locks"
    engine.requests.withdraw([listener])
    engine.close()
