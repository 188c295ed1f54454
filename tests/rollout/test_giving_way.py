"""Tests of long work in slices."""

from __future__ import annotations

import threading

import pytest

from lockstep.rollout import giving_way as module
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.control.desk.intake import prompt_ids
from lockstep.rollout.engine import Engine
from lockstep.rollout.giving_way import give_way, giving_way, others_compute
from lockstep.rollout.grammars.cache import GrammarCache
from lockstep.rollout.grammars.compiler import Constraint
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
    with giving_way(lambda: waits.append(1), threading.Lock()):
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
    with pytest.raises(ZeroDivisionError), giving_way(lambda: waits.append(1), threading.Lock()):
        raise ZeroDivisionError
    give_way()
    assert len(waits) == 1


def test_the_prompts_and_samples_of_one_request_are_made_in_slices(make_model, monkeypatch):
    """Thousands are made on a thread, beside the event loop of a server."""
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="80 blocks"))
    listener, waits = Listener(), []
    monkeypatch.setattr(module, "_SLICE_S", 0.0)

    def wait() -> None:
        waits.append(engine.driver.lock._is_owned() or engine.driver.inbox.is_locked_by_me)

    with giving_way(wait, threading.Lock()):
        ids = engine.requests.submit([[1, 2]] * 5, [SamplingParams(n=20)] * 5, listener, streamed=False)
    assert sum(map(len, ids)) == 100
    assert len(waits) == 5 + 100
    assert not any(waits), "others need these locks"
    engine.requests.withdraw([listener])
    engine.close()


def test_one_of_the_threads_computes_at_a_time_and_others_while_it_waits(monkeypatch):
    monkeypatch.setattr(module, "_SLICE_S", 0.0)
    token, computing, most = threading.Lock(), [], []

    def compute() -> None:
        with giving_way(lambda: None, token):
            for _ in range(50):
                computing.append(1)
                most.append(len(computing))
                threading.Event().wait(1e-4)  # lets others run that are allowed to
                computing.pop()
                give_way()

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 200 and max(most) == 1

    with giving_way(lambda: None, token):
        with others_compute():
            assert not token.locked()
        assert token.locked()
    assert not token.locked()


def test_a_thread_that_tokenises_or_waits_for_a_grammar_lets_others_compute(make_model):
    token, seen = threading.Lock(), []

    class Tokenizer:
        eos_token_id = None

        def __call__(self, text, **_):
            seen.append(token.locked())
            return {"input_ids": [1, 2, 3]}

    class Compiler:
        def __call__(self, constraint):
            with token:  # held by the thread that waits, it would never be had
                raise ValueError(f"{constraint.text} is refused")

        def close(self) -> None:
            pass

    cache = GrammarCache(Compiler)

    with giving_way(lambda: None, token):
        assert prompt_ids("text", Tokenizer(), 10) == [1, 2, 3]
        assert seen == [False]
        with pytest.raises(ValueError, match="a is refused"):
            cache.get_all([Constraint("regex", "a")])
    cache.close()
