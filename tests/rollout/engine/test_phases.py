"""Phases of a shared module: the trainer's again after each call, whatever happens in it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import PhaseError, SamplingRefused
from lockstep.tests.rollout.engine.callers import LONG, PROMPTS, assert_idle, sampled


def marks(module: torch.nn.Module) -> list[tuple]:
    """Return every property of a module that a rollout might change."""
    return (
        [
            (
                name,
                m.training,
                "forward" in vars(m),
                *map(len, (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)),
            )
            for name, m in module.named_modules()
        ]
        + [(name, p.requires_grad, p.data_ptr(), p.grad is None) for name, p in module.named_parameters()]
        + [(module.config._attn_implementation, module.config._experts_implementation, torch.is_grad_enabled())]
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_generating_leaves_the_module_as_it_was(make_model, family):
    model = make_model(family, attn_implementation="eager").train()
    model.model.layers[0].mlp.eval()  # a mixed state, as with a frozen part
    model.model.embed_tokens.weight.requires_grad_(False)
    calls = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    before = marks(model)
    engine = Engine(model, EngineConfig(kv_cache="16 blocks"))
    assert marks(model) == before
    calls.clear()
    engine.generate([1, 2, 3], sampled(max_new_tokens=3))
    assert marks(model) == before and len(calls) == 3
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


class Broken(Exception):
    pass


def test_module_is_restored_after_a_failing_forward_and_the_others_go_on(make_engine):
    engine = make_engine()
    expected = [c.token_ids for c in engine.generate(PROMPTS, sampled())]
    module, before = engine.model.module, marks(engine.model.module)
    ids = [engine.add(prompt, sampled())[0] for prompt in PROMPTS]
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> None:
        raise Broken

    hook = module.model.layers[1].register_forward_hook(fail)
    with pytest.raises(Broken):
        engine.step()
    with pytest.raises(Broken):
        engine.generate([9, 9], sampled())
    hook.remove()
    assert marks(module) == before and not engine.model.in_rollout_phase
    engine.check_integrity()
    answers = {}
    while engine.has_work:
        answers |= {c.id: c.token_ids for c in engine.step()}
    assert [answers[id] for id in ids] == expected
    assert_idle(engine)


def test_phases_nest_and_the_outermost_restores(make_engine):
    model = make_engine().model
    before = marks(model.module)

    def fail_inside() -> None:
        with model.rollout_phase(), model.rollout_phase():
            assert model.in_rollout_phase and not model.module.training
            with model.training_numerics():
                pass
            assert model.module.config._attn_implementation.startswith("lockstep")
            raise Broken

    with pytest.raises(Broken):
        fail_inside()
    assert marks(model.module) == before


def test_module_outside_its_phase_refuses_to_run_for_the_engine(make_engine):
    model = make_engine().model
    rows = torch.tensor([0])
    with pytest.raises(PhaseError, match="trainer's"):
        model.forward(rows, rows, rows, None)


@pytest.mark.parametrize("ends_first", ["first", "second"])
def test_two_modules_with_one_configuration_are_the_trainers_when_both_phases_have_ended(make_model, ends_first):
    """As a policy and its reference that were made from one configuration object."""
    first = make_model("qwen3", attn_implementation="eager")
    second = type(first)(first.config)
    assert second.config is first.config
    engines = [Engine(module, EngineConfig(kv_cache="16 blocks")) for module in (first, second)]
    expected = [engine.generate([1, 2, 3], sampled(max_new_tokens=3))[0].token_ids for engine in engines]
    before, phases = [marks(first), marks(second)], [engine.model.rollout_phase() for engine in engines]
    order = phases if ends_first == "first" else phases[::-1]
    for phase in phases:
        phase.__enter__()
    order[0].__exit__(None, None, None)
    assert first.config._attn_implementation.startswith("lockstep")
    order[1].__exit__(None, None, None)
    assert [marks(first), marks(second)] == before
    assert [e.generate([1, 2, 3], sampled(max_new_tokens=3))[0].token_ids for e in engines] == expected


def test_a_configuration_that_is_shared_under_other_numerics_is_refused_by_name(make_model):
    first = make_model("qwen3")
    second = type(first)(first.config).to(torch.bfloat16)
    engines = [
        Engine(module, EngineConfig(kv_cache="16 blocks", invariant=invariant))
        for module, invariant in ((first, True), (second, False))
    ]
    before = marks(first)
    with engines[0].model.rollout_phase(), pytest.raises(PhaseError, match=r"Qwen3Config is shared .* copy of its own"):
        engines[1].generate([1, 2, 3], sampled(max_new_tokens=1))
    assert marks(first) == before
    assert len(engines[1].generate([1, 2, 3], sampled(max_new_tokens=1))[0].token_ids) == 1


# -- the phase of coroutines -----------------------------------------------------------------------


def test_coroutines_begin_one_phase_and_not_one_for_each_of_their_steps(make_engine):
    engine = make_engine()
    before, num_begun = marks(engine.model.module), engine.model.phase.num_begun

    async def all_at_once() -> list:
        return await asyncio.gather(*(engine.agenerate(prompt, sampled(max_new_tokens=60)) for prompt in PROMPTS))

    answers = [c.token_ids for [c] in asyncio.run(all_at_once())]
    assert engine.model.phase.num_begun - num_begun <= 2
    assert marks(engine.model.module) == before
    assert_idle(engine)
    assert answers == [c.token_ids for c in engine.generate(PROMPTS, sampled(max_new_tokens=60))]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_gives_the_module_back_while_a_coroutine_waits(make_engine, mode):
    engine = make_engine()
    [expected] = engine.generate(LONG, sampled(max_new_tokens=100))
    before = marks(engine.model.module)

    async def pause_midway() -> list:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=100)))
        while not engine.state()["num_running"]:
            await asyncio.sleep(0)
        for _ in range(3):
            engine.pause_generation(mode)
            assert marks(engine.model.module) == before and not engine.model.in_rollout_phase
            engine.model.module(torch.tensor([[1, 2, 3]])).logits.sum().backward()
            assert marks(engine.model.module)[-1] == before[-1] and not task.done()
            engine.model.module.zero_grad()
            while not engine.driver._waiters.num_waiting:  # for the end of the pause
                await asyncio.sleep(0)
            assert marks(engine.model.module) == before
            engine.continue_generation()
            await asyncio.sleep(0)
        return await task

    [answer] = asyncio.run(pause_midway())
    assert answer.token_ids == expected.token_ids and marks(engine.model.module) == before
    assert_idle(engine)


def test_a_thread_that_is_started_leaves_the_module_to_the_trainer_though_a_coroutine_waits(make_engine):
    engine = make_engine()

    async def start_midway() -> list:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=100)))
        while not engine.state()["num_running"]:
            await asyncio.sleep(0)
        engine.start()
        assert not engine.model.in_rollout_phase and engine.model.module.training
        with engine.model.rollout_phase():
            return await task

    [answer] = asyncio.run(start_midway())
    engine.stop()
    assert answer.finish_reason.type == "length" and not engine.model.in_rollout_phase
    assert_idle(engine)


@pytest.mark.parametrize("ends_by", ["cancel", "failing step"])
def test_a_coroutine_that_does_not_reach_its_end_leaves_the_module_as_it_was(make_engine, ends_by):
    engine = make_engine()
    before = marks(engine.model.module)

    async def end_midway() -> None:
        task = asyncio.create_task(engine.agenerate(LONG, sampled(max_new_tokens=400)))
        while not engine.state()["num_running"]:
            await asyncio.sleep(0)
        if ends_by == "cancel":
            task.cancel()
        else:
            engine.weights.refuse_sampling("torn")
        with pytest.raises((asyncio.CancelledError, SamplingRefused)):
            await task

    asyncio.run(end_midway())
    assert not engine.model.in_rollout_phase and marks(engine.model.module) == before
    assert_idle(engine)
