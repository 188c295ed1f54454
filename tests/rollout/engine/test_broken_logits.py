"""Weights that give NaN, as of a policy that has diverged: who runs the steps hears of it, and good weights serve."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import PATIENCE, soon, submit, wait_until

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(params=["plain", "overlap"])
def engine(request, make_model, restore_threads) -> Iterator[Engine]:
    torch.set_num_threads(1)
    settings = EngineConfig(kv_cache="40 blocks", overlap=request.param == "overlap")
    engine = Engine(make_model("qwen3"), settings)
    with engine.model.rollout_phase():
        yield engine
        engine.close()


@contextmanager
def broken(engine: Engine, rows: slice = slice(None)) -> Iterator[None]:
    """Make the embeddings of these tokens NaN, and so the logits of sequences with them."""
    weight = engine.model.module.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[rows] = float("nan")
    yield
    with torch.no_grad():
        weight.copy_(kept)


def test_a_started_engine_aborts_the_requests_and_serves_with_good_weights_again(engine):
    expected = [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]
    engine.start()
    with broken(engine):
        engine.weights.commit_weights("diverged", None)
        ends = [one.finish_reason for one in engine.generate(PROMPTS, GREEDY)]
    assert all(end.type == "abort" and "NaN or infinite" in end.message for end in ends)
    assert engine.is_started and engine.failure is None
    engine.weights.commit_weights("good", None)
    assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == expected


def test_only_the_requests_with_broken_logits_are_aborted(engine):
    if engine.model.module.get_output_embeddings().weight is engine.model.module.get_input_embeddings().weight:
        pytest.fail("the head would be broken too")
    expected = [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]
    assert not any(7 in tokens for tokens in expected)
    engine.start()
    with broken(engine, slice(7, 8)):
        engine.weights.commit_weights("broken at 7", None)
        found = engine.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found[:2]] == expected[:2] and found[2].finish_reason.type == "abort"


def test_the_caller_that_runs_the_steps_hears_of_it(engine):
    engine.start()
    engine.stop()
    with broken(engine), pytest.raises(BrokenLogits, match="NaN") as caught:
        engine.generate(PROMPTS, GREEDY)
    assert len(caught.value.ids) == 3 and not engine.has_work


def test_broken_logits_are_raised_to_the_call_that_waits_for_them(engine):
    """The call that happened to run the step got the error, and its own requests were aborted."""
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    expected = [one.token_ids for one in engine.generate(PROMPTS[:2], params)]
    assert not any(7 in tokens for tokens in expected)
    engine.flush_cache()
    entered, is_asked = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        entered.set()
        assert is_asked.wait(PATIENCE)

    with broken(engine, slice(7, 8)):
        engine.weights.commit_weights("broken at 7", None)
        hook = engine.model.module.model.layers[0].register_forward_pre_hook(wait)
        [id] = engine.add(PROMPTS[1], params)
        first = submit(engine.generate, PROMPTS[0], params)
        assert entered.wait(PATIENCE)
        second = submit(engine.generate, [PROMPTS[2], PROMPTS[0]], params)
        wait_until(lambda: len(engine.mailboxes) >= 2)
        is_asked.set()
        hook.remove()
        with pytest.raises(BrokenLogits, match="NaN") as caught:
            soon(second)
        assert len(caught.value.ids) == 1
        assert [one.token_ids for one in soon(first)] == expected[:1]
        answers = []
        while not answers:
            answers = engine.step()
    assert [(one.id, one.token_ids) for one in answers] == [(id, expected[1])]
    assert not engine.has_work and len(engine.mailboxes) == 0


def test_broken_logits_are_raised_to_the_coroutine_that_waits_for_them(engine):
    params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    expected = engine.generate(PROMPTS[0], params)[0].token_ids
    engine.flush_cache()

    async def ask() -> list[object]:
        calls = (engine.agenerate(prompt, params) for prompt in (PROMPTS[0], PROMPTS[2]))
        return await asyncio.gather(*calls, return_exceptions=True)

    async def read() -> None:
        async for _ in engine.astream(PROMPTS[2], params):
            pass

    with broken(engine, slice(7, 8)):
        engine.weights.commit_weights("broken at 7", None)
        [answer], error = asyncio.run(ask())
        assert answer.token_ids == expected and isinstance(error, BrokenLogits)
        with pytest.raises(BrokenLogits):
            asyncio.run(read())
        with pytest.raises(BrokenLogits):
            list(engine.stream(PROMPTS[2], params))
    assert not engine.has_work and len(engine.mailboxes) == 0


def test_a_command_is_not_refused_for_the_broken_logits_of_others(make_model, restore_threads):
    torch.set_num_threads(1)
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="40 blocks", overlap=True, speculation="off"))

    def refuse() -> list[object]:
        raise BrokenLogits(
            "the model's logits are NaN", [request.id for request in engine.parts.managers.engine.requests()]
        )

    with engine.model.rollout_phase():
        for prompt in PROMPTS:
            engine.add(prompt, GREEDY)
        engine.step()  # the second one runs, and its results are read by what comes next
        [flight] = engine.driver._loop._flights
        flight.handle = SimpleNamespace(results=refuse, abandon=flight.handle.abandon)
        assert engine.pause_generation("in_place").mode == "in_place"
        engine.continue_generation()
        ends = engine.step()
        assert [one.finish_reason.type for one in ends] == ["abort"] * 3 and not engine.has_work
        engine.close()
