"""Sequences that are verified at a commit are those of an engine that had the new weights from the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.rollout.engine import Engine
from lockstep.tests.rollout.speculation.drafting import Case, Play, play, record
from lockstep.tests.rollout.speculation.test_equality import FAMILIES, GROUPS, WAYS
from lockstep.tests.support.covering import covering

CHANGES = ("none", "one ulp", "small", "fresh")
# "none" is a commit of equal weights: all that was drawn stays.


@contextmanager
def changed(model: PreTrainedModel, change: str) -> Iterator[None]:
    """Change the weights in place; they are as before after the block."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if change == "one ulp":
                parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, float("inf"))))
            elif change == "small":
                parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
            elif change == "fresh":
                parameter.normal_(std=0.05)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])


def from_the_start(make_engine, model: PreTrainedModel, change: str, group: list[Case]) -> dict[str, tuple]:
    """Return the records of an engine that has the changed weights from the start."""
    with changed(model, change):
        engine = make_engine(model, speculation="off")
        engine.weights.commit_weights("new", None)
        records = play(engine, group)
        engine.close()
    return records


def commit_at(engine: Engine, model: PreTrainedModel, change: str, group: list[Case], at: int, name: str) -> Play:
    """Run the cases, of which `at` steps are under the old weights, to the end."""
    run = Play(engine)
    with engine.model.rollout_phase():
        run.add(group, name)
        for _ in range(at):
            run.step()
        with changed(model, change):
            engine.pause_generation("in_place")
            run.look()
            engine.weights.commit_weights("new", None, in_flight="verify")
            engine.continue_generation()
            run.look()
            run.to_the_end()
        engine.weights.commit_weights("old", None)
    return run


def compare(run: Play, expected: dict[str, tuple], name: str) -> tuple[int, int]:
    """Compare what had not ended at the commit. Returns the numbers of kept and of all tokens of these answers."""
    num_kept = num_all = 0
    for id, answer in run.answers.items():
        if answer.weight_version == "new":
            assert record(answer) == expected[id.replace(name, "r")], id
            num_kept, num_all = num_kept + answer.num_kept_tokens, num_all + len(answer.token_ids)
    return num_kept, num_all


@pytest.mark.slow
@covering(
    1, rest="exhaustive", family=FAMILIES, dtype=[torch.float32, torch.bfloat16], way=[*WAYS], change=CHANGES,
    group=[0, 1], speculation=["off", "auto"],
)  # fmt: skip
def test_a_verified_answer_is_the_one_from_the_start(
    small, make_engine, family, dtype, way, change, group, speculation
):
    model = small(family, dtype)
    expected = from_the_start(make_engine, model, change, GROUPS[group])
    engine = make_engine(model, speculation=speculation, **WAYS[way])
    num_kept = num_all = 0
    for at in range(1, 18, 4):
        run = commit_at(engine, model, change, GROUPS[group], at, f"c{at}-")
        kept, all_tokens = compare(run, expected, f"c{at}-")
        num_kept, num_all = num_kept + kept, num_all + all_tokens
    assert num_all > 0
    if speculation == "off" and change != "fresh":  # with drafts most have ended before the commit
        assert num_kept > (10 if change == "small" else 20)  # after a large change some part at their first tokens
    engine.close()


@covering(
    1, rest="exhaustive", way=["plain", "overlap", "2 stages"], family=["qwen3", "qwen3_5"], group=[0, 1],
    mode=["in_place", "retract", None], room=[{"kv_cache": 14}, {"max_num_batched_tokens": 20}, {"max_num_seqs": 2}],
)  # fmt: skip
def test_commits_while_a_commit_is_verified(small, make_engine, way, family, group, mode, room):
    model, cases = small(family), GROUPS[group]
    expected = from_the_start(make_engine, model, "small", cases)
    engine = make_engine(model, speculation="off", **{"chunked_prefill_size": 16, **WAYS[way], **room})
    num_steps = 0
    run = Play(engine)
    with engine.model.rollout_phase():
        run.add(cases, "m")

        def commit_often(play: Play) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps > 24 or num_steps % 5 not in (1, 2):  # two commits with one step between them
                return
            if mode is not None:
                engine.pause_generation(mode)
            engine.weights.commit_weights("old", None, in_flight="verify")
            engine.continue_generation()

        for _ in range(12):
            if engine.has_work:
                commit_often(run)
                run.step()
        with changed(model, "small"):
            engine.driver.drain()
            run.look()
            engine.weights.commit_weights("new", None, in_flight="verify")
            run.to_the_end(lambda play: engine.weights.commit_weights("new", None, in_flight="verify")
                           if play.num_steps in (14, 15, 19) else None)  # fmt: skip
    assert compare(run, expected, "m")[1] > 0
    engine.close()
