"""The grammar's state along tokens that a draft proposes: masks as if each token had been waited for, and no trace of
tokens that do not come."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from lockstep.rollout.grammars.catalog import Grammars
from lockstep.rollout.grammars.matcher import allows
from lockstep.rollout.grammars.state import GrammarState
from lockstep.rollout.sampling_params import SamplingParams

SCHEMA = json.dumps({
    "type": "object", "properties": {"name": {"enum": ["the value", "ключ"]}, "items": {"type": "array",
    "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}}, "required": ["name", "items"],
    "additionalProperties": False,
})  # fmt: skip


@pytest.fixture(scope="module")
def make_state(bpe_tokenizer):
    """Make a state of the schema in a mode, at its first token."""
    grammars = Grammars(bpe_tokenizer, 1024, frozenset({0}))

    def make(mode: str, schema: str = SCHEMA) -> GrammarState:
        params = SamplingParams(json_schema=schema, jump_forward=mode)
        [grammar] = grammars.compiled([params])
        return grammars.state(grammar, params)

    yield make
    grammars.close()


def walk(state: GrammarState, dice: random.Random, most: int) -> tuple[list[int], list[np.ndarray]]:
    """Draw an output token by token as the loop does; returns its tokens, and the mask before each."""
    output, masks = list[int](), list[np.ndarray]()
    while len(output) < most and not state.is_over:
        masks.append(state.mask().copy())
        output.append(dice.choice([id for id in range(1024) if allows(masks[-1], id)]))
        state.follow(output)
    return output, masks


@pytest.mark.parametrize("mode", ["off", "text"])
def test_tokens_that_come_several_at_once_leave_the_state_of_tokens_that_come_alone(make_state, mode):
    """With jumps off a stretch of canonical tokens is planned where the output reaches forced text, and is gone on with
    from inside: a plan from a later token may be another one."""
    dice = random.Random(1)
    for _ in range(30):
        output, masks = walk(make_state(mode), dice, 24)
        state, position = make_state(mode), 0
        while position < len(output):
            state.follow(output[:position])
            assert np.array_equal(state.mask(), masks[position]), (output, position)
            position += dice.randrange(1, 9)


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_looking_ahead_leaves_no_trace(make_state, mode):
    dice = random.Random(2)
    for _ in range(20):
        output, masks = walk(make_state("off"), dice, 24)
        state = make_state(mode)
        for position, mask in enumerate(masks):
            state.follow(output[:position])
            if mode == "off":
                assert np.array_equal(state.mask(), mask)
            before = state.mask().copy()
            with state.looking_ahead(1.0):
                ahead = output[:position]
                for _ in range(dice.randrange(5)):
                    allowed = [id for id in range(1, 1024) if allows(state.mask(), id)]
                    if not allowed:
                        break
                    ahead = [*ahead, dice.choice(allowed)]
                    state.follow(ahead)
            assert np.array_equal(state.mask(), before)


def test_a_look_ahead_that_takes_too_long_loses_no_state(make_state):
    state = make_state("text", "$$ANY$$")
    state.follow([])
    before = state.mask().copy()
    with state.looking_ahead(0.0):  # no time at all: the first token of text loses the matcher
        state.plan(100, follows_jump=False)
        assert state.is_lost
    assert not state.is_lost and np.array_equal(state.mask(), before)
    state.plan(100, follows_jump=False)
    assert not state.is_lost
