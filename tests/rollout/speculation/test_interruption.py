"""Pauses, aborts, failures, commits and broken rows around drafted steps: no request is lost, no bit changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import BrokenLogits
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.speculation.proposer import Proposal
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import (
    Case,
    Oracle,
    Play,
    check_nothing_is_left,
    counts,
    draft_always,
    outputs_of,
    play,
)  # fmt: skip
from lockstep.tests.support.covering import covering

WAYS: dict[str, dict[str, object]] = {
    "plain": {}, "overlap": {"overlap": True}, "2 stages": {"stages": 2},
    "ahead": {"overlap": True, "cuda_graph_batch_sizes": (2, 4, 8, 16, 32)},
}  # fmt: skip
CASES = [
    Case([(7 * i) % 900 for i in range(3 + 17 * n)], SamplingParams(
        max_new_tokens=11 + 3 * n, sampling_seed=n, temperature=float(n != 1), regex="[a-z ]*x" if n == 2 else None,
    )) for n in range(4)
]  # fmt: skip
ROOM = {"max_num_seqs": 3, "chunked_prefill_size": 16, "max_num_batched_tokens": 64}


@pytest.fixture
def start(make_engine):
    """Return a function of settings: an engine that drafts, and the records of CASES without drafts."""

    def make(family: str = "qwen3", spoil: str = "part", **config: object) -> tuple[Engine, dict[str, tuple]]:
        off = make_engine(family, speculation="off", **ROOM)
        expected = play(off, CASES)
        off.close()
        engine = make_engine(family, **{**ROOM, **config})
        draft_always(engine, ByCase(outputs_of(expected), VOCAB, spoil))
        return engine, expected

    return make


class Expected(RuntimeError):
    """The failure that a test causes."""


class ByCase(Oracle):
    """An oracle for requests whose ids end like those of the expected run: "x3" is "r3"."""

    def propose(self, request, most: int) -> Proposal:
        self.outputs = {**self.outputs, request.id: self.outputs["r" + request.id[-1]]}
        return super().propose(request, most)


def by_case(records: dict[str, tuple]) -> dict[str, tuple]:
    return {"r" + id[-1]: one for id, one in records.items()}


def assert_part_or_whole(records: dict[str, tuple], expected: dict[str, tuple]) -> int:
    """Check that each answer is the expected one, or an aborted beginning of it. Returns the number of aborted ones."""
    num_aborted = 0
    for id, one in by_case(records).items():
        if one[12].type != "abort":
            assert one == expected[id]
            continue
        num_aborted += 1
        for values, wanted in zip(one[2:6], expected[id][2:6], strict=True):
            assert values is None or values == wanted[: len(values)]
    return num_aborted


@covering(1, way=WAYS, mode=["abort", "retract", "in_place"], family=["qwen3", "qwen3_5"])
def test_a_pause_before_any_step_changes_no_bit(start, way, mode, family):
    engine, expected = start(family, **WAYS[way])
    num_steps = None
    with engine.model.rollout_phase():
        at = 0
        while num_steps is None or at < num_steps:

            def pause(run: Play, at: int = at) -> None:
                if run.num_steps == at:
                    engine.pause_generation(mode)
                    run.look()
                    engine.continue_generation()

            run = Play(engine)
            run.add(CASES, f"at{at} ")
            num_aborted = assert_part_or_whole(run.to_the_end(pause), expected)
            assert num_aborted == 0 or mode == "abort"
            num_steps = max(num_steps or 0, run.num_steps) if mode != "abort" else 14
            at += 1 + (family == "qwen3_5")
    assert at > 8 and counts(engine)[1] > (0 if mode == "abort" else at)  # an abort leaves few steps
    engine.close()


@covering(1, way=WAYS)
def test_an_abort_after_any_step_leaves_a_beginning(start, way):
    engine, expected = start(**WAYS[way])
    num_cut = 0
    with engine.model.rollout_phase():
        for at in range(1, 12, 2):
            run = Play(engine)
            run.add(CASES, "x")

            def abort(run: Play, at: int = at) -> None:
                if run.num_steps == at:
                    engine.abort_request(f"x{at % len(CASES)}")
                    run.look()

            num_cut += assert_part_or_whole(run.to_the_end(abort), expected)
    assert num_cut > 2 and counts(engine)[1] > 50
    engine.close()


@covering(1, way=["plain", "overlap", "ahead"], family=["qwen3", "lfm2"])
def test_a_step_that_fails_at_any_place_changes_no_bit(start, monkeypatch, way, family):
    engine, expected = start(family, **WAYS[way])
    runner, state = engine.parts.runner, {"at": -1, "num": 0}
    monkeypatch.setattr(runner, "launch", failing_at_one(runner.launch, state))
    assert_failures_change_nothing(engine, expected, state)


def failing_at_one(function: Callable, state: dict[str, int]) -> Callable:
    """Return the function, which fails at call number `at`; `num` counts its calls."""

    def call(*arguments: object) -> object:
        state["num"] += 1
        if state["num"] == state["at"]:
            raise Expected
        return function(*arguments)

    return call


def assert_failures_change_nothing(engine: Engine, expected: dict[str, tuple], state: dict[str, int]) -> None:
    """Run the cases again and again; each time another call fails, by its number in `state`."""
    num_failures = 0
    with engine.model.rollout_phase():
        for at in range(1, 10, 2):
            state["at"], state["num"] = at, 0
            run = Play(engine)
            run.add(CASES, "x")
            while engine.has_work:
                with contextlib.suppress(Expected):
                    run.step()
                    continue
                num_failures += 1
                run.look()
            assert by_case(run.to_the_end()) == expected
    assert num_failures == 5 and counts(engine)[1] > 50
    engine.close()


@pytest.mark.parametrize("way", ["plain", "overlap", "2 stages"])
def test_a_source_that_fails_ends_its_step_alone(start, way):
    engine, expected = start(**WAYS[way])
    source, state = engine.parts.speculation._sources["oracle"], {"at": -1, "num": 0}
    source.propose = failing_at_one(source.propose, state)
    assert_failures_change_nothing(engine, expected, state)


@covering(1, way=WAYS, family=["qwen3", "qwen3_5"])
def test_weights_that_change_between_steps_are_named_by_their_tokens(make_engine, small, way, family):
    """Two runs with the same commits at the same tokens, with drafts and without."""
    found, num_accepted = [], 0
    for speculation in ("off", "auto"):
        model = small(family)
        engine = make_engine(model, speculation=speculation, **WAYS[way])
        if found:
            oracle = Oracle(outputs_of(found[0]), VOCAB)
            draft_always(engine, oracle, depth=4)
        run, versions = Play(engine), [5, 11, 12]
        with engine.model.rollout_phase():
            run.add(CASES[3:])
            while versions:
                num_left = versions[0] - len(run.tokens["r0"])
                if found:
                    oracle.outputs = {
                        "r0": found[0]["r0"][2][: max(versions[0] - 1, 0)]
                    }  # no further than to the commit
                if num_left > 0:
                    run.step()
                    continue
                engine.pause_generation("in_place")
                run.look()
                with torch.no_grad():
                    for parameter in engine.model.trained_module.parameters():
                        parameter.mul_(1.05)
                engine.weights.commit_weights(f"v{versions.pop(0)}", None)
                engine.continue_generation()
            if found:
                oracle.outputs = outputs_of(found[0])
            found.append(run.to_the_end())
        num_accepted = counts(engine)[1] if found[1:] else 0
        engine.close()
    assert num_accepted > 2
    assert found[0] == found[1]
    assert len(found[0]["r0"][13]) > 2


class BrokenRows:
    """Makes the logits of rows of wrong drafts NaN, by wrapping the function that samples from them."""

    def __init__(self, engine: Engine, outputs: dict[str, tuple[int, ...]], *, accepted_too: bool = False) -> None:
        self.num_broken = 0
        sampler = engine.parts.runner._sampler
        sample = sampler.sample

        def broken(logits, rows, allowed=()):
            logits = logits.clone()
            for index, row in enumerate(rows):
                num = row.request.sequence.num_output_tokens
                true = outputs[row.request.id][num : num + len(row.drafted)]
                if row.drafted and (accepted_too or tuple(row.drafted) != tuple(true)):
                    logits[index] = float("nan")
                    self.num_broken += 1
            return sample(logits, rows, allowed)

        sampler.sample = broken


def test_broken_logits_behind_a_rejected_token_disturb_nobody(make_engine):
    off = make_engine(speculation="off", cuda_graph_batch_sizes=())
    expected = play(off, CASES)
    engine = make_engine(cuda_graph_batch_sizes=())
    draft_always(engine, Oracle(outputs_of(expected), VOCAB, "part"))
    broken = BrokenRows(engine, outputs_of(expected))
    assert play(engine, CASES) == expected
    assert broken.num_broken > 20 and counts(engine)[1] > 10
    off.close()
    engine.close()


def test_broken_logits_of_an_accepted_token_end_the_step(make_engine):
    off = make_engine(speculation="off", cuda_graph_batch_sizes=())
    expected = play(off, CASES[:1])
    engine = make_engine(cuda_graph_batch_sizes=())
    draft_always(engine, Oracle(outputs_of(expected), VOCAB))
    BrokenRows(engine, outputs_of(expected), accepted_too=True)
    with pytest.raises(BrokenLogits, match="'r0' first"):
        play(engine, CASES[:1])
    check_nothing_is_left(engine)
    engine.abort_request(abort_all=True)
    off.close()
    engine.close()
