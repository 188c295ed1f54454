"""Tests of one sequence: the transitions between its states, and the limits of its counters."""

from __future__ import annotations

import itertools

import pytest

from lockstep.rollout.errors import IllegalTransition, LockstepError
from lockstep.rollout.sequences.sequence import HOLDS_BLOCKS, TERMINAL, TRANSITIONS, Sequence, State

W, R, P, WP, F, IG = (
    State.WAITING,
    State.RUNNING,
    State.PAUSED,
    State.WAITING_PREEMPT,
    State.FINISHED,
    State.IGNORED,
)
LEGAL = {(W, R), (W, IG), (W, F), (R, P), (R, WP), (R, F), (P, R), (P, WP), (P, F), (WP, R), (WP, F)}
WAY_TO = {W: (), R: (R,), P: (R, P), WP: (R, WP), F: (F,), IG: (IG,)}


def sequence_in(state: State) -> Sequence:
    sequence = Sequence("a", [1, 2, 3])
    for step in WAY_TO[state]:
        sequence.move(step)
    return sequence


@pytest.mark.parametrize(("start", "to"), list(itertools.product(State, State)), ids=lambda s: s.name)
def test_state_leads_where_the_design_says_and_nowhere_else(start, to):
    sequence = sequence_in(start)
    if (start, to) in LEGAL:
        sequence.move(to)
        assert sequence.state is to
    else:
        with pytest.raises(IllegalTransition, match=f"'a' is {start.name} and cannot become {to.name}"):
            sequence.move(to)
        assert sequence.state is start


def test_illegal_transition_is_a_condition_of_ours_that_a_caller_can_catch():
    assert issubclass(IllegalTransition, LockstepError)


def test_every_state_is_queued_or_holds_blocks_or_is_terminal():
    queued = {State.WAITING, State.WAITING_PREEMPT}
    for state in State:
        assert sum(state in group for group in (queued, HOLDS_BLOCKS, TERMINAL)) == 1
        assert sequence_in(state).is_terminal is (state in TERMINAL)
        assert (TRANSITIONS[state] == frozenset()) is (state in TERMINAL)


def test_only_move_writes_the_state():
    with pytest.raises(AttributeError):
        Sequence("a", [1]).state = State.RUNNING


def test_prompt_boundary_stays_as_output_grows():
    sequence = Sequence("a", (5, 6, 7))
    sequence.token_ids += [8, 9]
    assert (sequence.num_prompt_tokens, sequence.num_tokens, sequence.num_output_tokens) == (3, 5, 2)
    assert sequence.output_ids == [8, 9]


def test_sequence_keeps_its_own_copy_of_the_prompt():
    prompt = [5, 6]
    sequence = Sequence("a", prompt)
    prompt.append(7)
    assert sequence.token_ids == [5, 6]


@pytest.mark.parametrize(("num_done", "expected"), [(0, True), (2, True), (3, False), (4, False)])
def test_prefilling_means_more_than_the_last_known_token_lacks_kv(num_done, expected):
    sequence = Sequence("a", [1, 2, 3, 4])
    if num_done:
        sequence.stage_processed(num_done)
    assert sequence.is_prefilling is expected


def test_one_token_prompt_is_never_prefilling():
    assert not Sequence("a", [1]).is_prefilling


def test_counters_never_pass_what_is_known_and_stages_come_before_steps():
    sequence = Sequence("a", [1, 2, 3])
    with pytest.raises(AssertionError):
        sequence.step_processed(1)
    sequence = Sequence("a", [1, 2, 3])
    with pytest.raises(AssertionError):
        sequence.stage_processed(4)
    sequence = Sequence("a", [1, 2, 3])
    with pytest.raises(AssertionError):
        sequence.stage_processed(0)


def test_forgetting_progress_keeps_tokens_and_boundary():
    sequence = Sequence("a", [1, 2])
    sequence.stage_processed(2)
    sequence.step_processed(2)
    sequence.token_ids.append(3)
    sequence.forget_progress()
    assert (sequence.num_tokens_step_processed, sequence.num_tokens_stage_processed) == (0, 0)
    assert (sequence.token_ids, sequence.num_prompt_tokens) == ([1, 2, 3], 2)
