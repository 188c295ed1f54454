"""The grammar's state behind an output that grows, and whose last tokens are replaced: as if it were read from its
beginning, which it is not."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from lockstep.rollout.grammars.catalog import Grammars
from lockstep.rollout.grammars.jump import Jump
from lockstep.rollout.grammars.state import GrammarState
from lockstep.rollout.loop.grammar_steps import follow_output
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.sequence import Sequence
from lockstep.tests.rollout.grammars.conftest import VOCAB
from lockstep.tests.rollout.sequences.watched import Watched

SCHEMA = json.dumps({
    "type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "object", "additionalProperties": False,
    "properties": {"name": {"enum": ["the value", "ключ"]}, "price": {"type": "integer"}},
    "required": ["name", "price"]},
})  # fmt: skip
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def make_state(bpe_tokenizer):
    grammars = Grammars(bpe_tokenizer, VOCAB, frozenset({0}))

    def make(mode: str, **form: str) -> GrammarState:
        params = SamplingParams(jump_forward=mode, **form)
        [grammar] = grammars.compiled([params])
        return grammars.state(grammar, params)

    yield make
    grammars.close()


def ids_of(mask: np.ndarray) -> list[int]:
    """Return the tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little", count=VOCAB)).tolist()


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_a_token_reads_the_last_ones_only_however_long_the_output_is(make_state, mode):
    state, sequence = make_state(mode, regex="[a-z]*"), Sequence("a", PROMPT)
    letters = [id for id in ids_of(state.mask()) if id]
    sequence.token_ids += [letters[at % len(letters)] for at in range(2000)]
    follow_output(state, sequence)
    sequence.token_ids, state._followed = Watched(sequence.token_ids), Watched(state._followed)
    for step in range(20):
        follow_output(state, sequence)
        assert not state.plan(10_000, follows_jump=False) and state.mask().any()
        with state.looking_ahead(1.0):
            state.follow(letters[:3], 2000 + step)
            assert not state.plan(10_000, follows_jump=False)
        sequence.token_ids.append(letters[step])
        follow_output(state, sequence)
        assert not state.is_over
    assert max(sequence.token_ids.most, state._followed.most) <= 16
    assert list(state._followed) == sequence.output_ids


class Output:
    """An output whose last tokens a loop replaces, cuts and takes back, with two states that follow it: one reads the
    tokens that may have changed, the other one all."""

    def __init__(self, make_state, mode: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sequence = Sequence("a", PROMPT)
        self.state, self.other = make_state(mode, json_schema=SCHEMA), make_state(mode, json_schema=SCHEMA)
        self.num_jumps = 0

    def step(self) -> bool:
        """Run one step, in which a jump may begin, and be settled or undone; returns whether the output goes on."""
        sequence, chance = self.sequence, self.chance
        self.follow()
        if sequence.jump_start is None:
            jump, other = (
                one.plan(sequence.num_output_tokens + 30, follows_jump=self.num_jumps > 0)
                for one in (self.state, self.other)
            )
            assert jump == other
            if jump and chance.random() < 0.8:  # else there are no blocks for it
                self.begin(jump)
        self.look_ahead()
        if chance.random() < 0.3:
            sequence.undo_jump()
            self.follow()
        if chance.random() < 0.1 and sequence.jump_start is None:
            sequence.cut(chance.randrange(sequence.num_prompt_tokens, sequence.num_tokens + 1))
            self.follow()
        mask = self.mask()
        if not mask.any():
            return False
        if chance.random() < 0.8:  # else the step has failed
            if sequence.jump_start is not None:
                sequence.settle_jump()
            sequence.token_ids.append(chance.choice(ids_of(mask)))
            self.follow()
        return not self.state.is_over

    def begin(self, jump: Jump) -> None:
        self.num_jumps += 1
        if self.chance.random() < 0.3:
            self.follow()  # the state stands before the jump again
        self.sequence.begin_jump(jump.num_rolled_back, jump.token_ids)
        if self.chance.random() < 0.5:
            self.follow()

    def follow(self) -> None:
        follow_output(self.state, self.sequence)
        self.other.follow(self.sequence.output_ids)

    def look_ahead(self) -> None:
        self.follow()
        token_ids = [id for id in ids_of(self.mask()) if id]
        if not token_ids:
            return
        ahead, num_output = self.chance.choice(token_ids), self.sequence.num_output_tokens
        with self.state.looking_ahead(1.0), self.other.looking_ahead(1.0):
            self.state.follow([ahead], num_output)
            self.other.follow([*self.sequence.output_ids, ahead])
            assert self.state.plan(200, follows_jump=True) == self.other.plan(200, follows_jump=True)
            self.mask()
        self.mask()

    def mask(self) -> np.ndarray:
        mask = self.state.mask().copy()
        assert np.array_equal(mask, self.other.mask())
        return mask


@pytest.mark.parametrize("mode", ["off", "exact", "text"])
def test_an_output_whose_end_changes_has_the_state_of_one_that_is_read_from_its_beginning(make_state, mode):
    num_jumps = 0
    for seed in range(5):
        output = Output(make_state, mode, seed)
        for _ in range(30):
            if not output.step():
                break
        num_jumps += output.num_jumps
    assert (num_jumps > 10) == (mode != "off")
