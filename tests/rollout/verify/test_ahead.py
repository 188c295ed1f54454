"""Batches that are begun before their turn are those that an engine draws which has their weights from the start."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from lockstep.rollout.ahead.group import Group, ReplayDiverged
from lockstep.rollout.ahead.rollouts import RolloutsAhead
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import EngineStopped
from lockstep.rollout.request_options import Begun, RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.drafting import record

NUM_BATCHES, PROMPTS, SAMPLES = 6, 4, 3
PATIENCE = 60


def batch(step: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return the prompts of a step: some of its samples are far longer than the others."""
    draw = random.Random(step)
    prompts = [[draw.randrange(3, 80) for _ in range(draw.randrange(2, 12))] for _ in range(PROMPTS)]
    lengths = [draw.choice([2, 3, 5, 40]) for _ in range(PROMPTS)]
    return prompts, [
        # min_new_tokens, for a part of a repeated answer may be shorter than it.
        SamplingParams(
            n=SAMPLES,
            max_new_tokens=length,
            min_new_tokens=length // 2,
            sampling_seed=100 * step + index,
            ignore_eos=True,
        )
        for index, length in enumerate(lengths)
    ]


def train(model, step: int) -> None:
    """Change the weights as a training step would."""
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.003 * torch.randn_like(parameter))


def train_and_commit(engine, model, step: int, *, in_flight) -> None:
    """Train, and commit while requests wait."""
    engine.pause_generation("retract")
    train(model, step)
    engine.weights.commit_weights(str(step + 1), None, in_flight=in_flight)
    engine.continue_generation()


@pytest.fixture
def weights(small) -> Iterator[Callable]:
    """Return a function that brings a model's first weights back; they are brought back at the end too."""
    model = small("qwen3", torch.float32)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def restore():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first[name])
        return model

    yield restore
    restore()


def synchronous(make_engine, model) -> list[list[tuple]]:
    """Return the records of a run that begins nothing ahead."""
    engine, steps = make_engine(model, speculation="off"), []
    for step in range(NUM_BATCHES):
        steps.append([record(one) for one in engine.generate(*batch(step))])
        train(model, step)
        engine.weights.commit_weights(str(step + 1), None)
    engine.close()
    return steps


def run_ahead(
    engine, model, num_ahead: int, ahead: RolloutsAhead, between: Callable[[], None] = lambda: None
) -> list[list[Completion]]:
    steps = []
    for step in range(NUM_BATCHES):
        for coming in range(step, min(step + num_ahead + 1, NUM_BATCHES)):
            if coming not in ahead:
                ahead.begin(coming, *batch(coming))
        steps.append(ahead.finish(step))
        between()
        train_and_commit(engine, model, step, in_flight="verify" if ahead.verifies else None)
    return steps


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 5}, {"kv_cache": "40 blocks"}, {"overlap": True}])
def test_batches_are_those_of_a_synchronous_run(make_engine, weights, num_ahead, settings):
    expected = synchronous(make_engine, weights())
    model = weights()
    engine = make_engine(model, **settings)
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        steps = run_ahead(engine, model, num_ahead, ahead)
        assert [[record(one) for one in step] for step in steps] == expected
        assert not engine.has_work
        engine.check_integrity()
    if num_ahead:
        assert engine.metrics.num_kept_tokens > 0
        assert engine.metrics.num_parted_tokens > 0
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_batches_are_those_of_a_synchronous_run_whatever_the_timing_was(make_engine, weights, seed):
    expected = synchronous(make_engine, weights())
    model = weights()
    engine = make_engine(model, max_num_seqs=7)
    draw, ahead = random.Random(seed), RolloutsAhead(engine)

    def train_for_some_steps() -> None:
        last = engine.metrics.num_steps + draw.choice([0, 1, 5, 30])
        come = threading.Event()
        engine.driver.at_step(last, come.set)
        while not come.wait(0.02) and engine.has_work:
            pass

    with engine.model.rollout_phase():
        engine.start()
        steps = run_ahead(engine, model, 2, ahead, train_for_some_steps)
    assert [[record(one) for one in step] for step in steps] == expected
    engine.close()


def test_a_commit_while_a_batch_is_being_finished_is_no_exception(make_engine, weights):
    model = weights()
    engine = make_engine(model)
    ahead, results = RolloutsAhead(engine), []
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        engine.start()
        committed = threading.Event()
        engine.driver.at_step(engine.metrics.num_steps + 6, committed.set)  # some samples have ended, some have not
        caller = threading.Thread(target=lambda: results.append(ahead.finish(0)))
        caller.start()
        assert committed.wait(PATIENCE)
        engine.pause_generation("in_place")
        train(model, 0)
        engine.weights.commit_weights("1", None, in_flight="verify")
        engine.continue_generation()
        caller.join(PATIENCE)
        fresh = [record(one) for one in engine.generate(*batch(0))]
    assert [record(one) for one in results[0]] == fresh
    assert {one.weight_version for one in results[0]} == {"1"}
    engine.close()


def test_coming_batches_take_the_places_that_the_current_one_leaves_and_no_more(make_engine, weights):
    engine = make_engine(weights())
    ahead, most = RolloutsAhead(engine), PROMPTS * SAMPLES
    with engine.model.rollout_phase():
        for step in range(3):
            ahead.begin(step, *batch(step))
        assert len(engine.live_sequences()) == most, "the second batch waits until the first leaves places"
        seen = []
        while engine.has_work:
            engine.step()
            seen.append(len(engine.live_sequences()))
        assert max(seen) <= most
        steps = [ahead.finish(step) for step in range(3)]
    assert [len(step) for step in steps] == [most] * 3
    assert engine.metrics.num_verified_tokens == 0  # no commit came in between
    engine.close()


def test_answers_that_will_be_drawn_again_have_places_before_coming_batches(make_engine, weights):
    model = weights()
    engine = make_engine(model)
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        while engine.has_work:
            engine.step()
        train_and_commit(engine, model, 0, in_flight="verify")
        ahead.begin(1, *batch(1))
        assert not engine.live_sequences(), "all places are those of the first batch"
        ahead.finish(0)
        assert engine.live_sequences(), "those of the second batch"
        ahead.finish(1)
    engine.close()


def test_a_batch_without_prompts_is_refused_and_its_key_is_free(make_engine, weights):
    engine = make_engine(weights())
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        with pytest.raises(ValueError, match="batch 0 has no prompts"):
            ahead.begin(0, [], [])
        ahead.begin(0, *batch(0))
        assert ahead.finish(0)
    engine.close()


def test_an_answer_costs_the_same_however_many_groups_there_are(make_engine, weights, monkeypatch):
    """Thousands of answers come in a step, each under the lock that the next step needs."""
    engine = make_engine(weights())
    ahead, num_open, counted = RolloutsAhead(engine), Group.num_open, []

    def counting(group: Group) -> int:
        counted.append(group)
        return num_open.fget(group)

    with engine.model.rollout_phase():
        for step in range(3):  # most of the second and the third wait for places
            ahead.begin(step, *batch(step))
        monkeypatch.setattr(Group, "num_open", property(counting))
        while engine.has_work:
            engine.step()
        monkeypatch.undo()
        assert all(step in ahead and ahead.finish(step) for step in range(3))
    num_groups, num_answers = 3 * PROMPTS, 3 * PROMPTS * SAMPLES
    assert num_answers <= len(counted) <= num_answers + 2 * num_groups  # of an answer its own group, of one that begins
    engine.close()


@pytest.mark.parametrize("in_flight", [None, "verify", "no commit"])
def test_samples_that_run_through_a_change_of_weights_are_drawn_again_however_it_came(make_engine, weights, in_flight):
    model = weights()
    engine = make_engine(model)
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        while sum(one.sequence.num_output_tokens > 4 for one in engine.parts.scheduler.running()) < SAMPLES:
            engine.step()
    train(model, 0)
    if in_flight != "no commit":
        engine.weights.commit_weights("1", None, in_flight=in_flight)
    found = [record(one) for one in ahead.finish(0)]
    assert found == [record(one) for one in engine.generate(*batch(0))]
    engine.close()


def test_a_grammar_is_not_compiled_again_for_a_group_that_begins_later(make_engine):
    engine = make_engine(max_grammars=1, max_num_seqs=2)
    ahead, cache = RolloutsAhead(engine), engine.parts.grammars.cache
    prompts, params = [[3, 1, 4], [1, 5, 9]], [SamplingParams(max_new_tokens=3, regex=regex) for regex in ("a+", "b+")]
    with engine.model.rollout_phase():
        ahead.begin(0, prompts, params)
        ahead.begin(1, prompts, params)
        num = cache.num_compiled
        assert len(ahead.finish(0)) == len(ahead.finish(1)) == 2
        assert cache.num_compiled == num
    engine.close()


def test_a_batch_is_taken_prompt_by_prompt_while_others_run(make_engine, weights):
    model = weights()
    engine = make_engine(model)
    expected = [record(one) for one in engine.generate(*batch(0))]
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        lengths = [params.max_new_tokens for params in batch(0)[1]]
        order = sorted(range(PROMPTS), key=lambda index: lengths[index])
        assert lengths[order[0]] < lengths[order[-1]]
        found: dict[int, list[tuple]] = {}
        for index in order:
            if index in found:
                continue  # it was there when one before it was taken
            answers = [record(one) for one in ahead.finish_groups(0, index)]
            for behind in range(len(answers) // SAMPLES):
                found[index + behind] = answers[behind * SAMPLES : (behind + 1) * SAMPLES]
            assert engine.has_work == (lengths[index] < lengths[order[-1]])
        assert 0 not in ahead
        with pytest.raises(KeyError):
            ahead.finish_groups(0, 0)
        ahead.begin(1, *batch(1))
        with pytest.raises(IndexError, match="batch 1 has 4 prompts, not 5"):
            ahead.finish_groups(1, 4)
        ahead.close()
    assert [one for index in range(PROMPTS) for one in found[index]] == expected
    engine.close()


def test_prompts_that_are_there_are_taken_with_the_first_one(make_engine, weights):
    engine = make_engine(weights())
    expected = [record(one) for one in engine.generate(*batch(0))]
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        found = []
        while 0 in ahead:  # in their order, whatever is there
            found += ahead.finish_groups(0, len(found) // SAMPLES)
        assert [record(one) for one in found] == expected
        ahead.begin(1, *batch(1))
        ahead.finish_groups(1, 1)
        while engine.has_work:
            engine.step()
        assert len(ahead.finish_groups(1, 0)) == SAMPLES  # the next prompt has been taken
        assert len(ahead.finish_groups(1, 2)) == SAMPLES * (PROMPTS - 2)
    engine.close()


def test_prompts_that_are_there_under_older_weights_are_not_taken_with_the_first_one(make_engine, weights):
    engine = make_engine(model := weights())
    ahead = RolloutsAhead(engine)
    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        while engine.has_work:
            engine.step()
        train_and_commit(engine, model, 0, in_flight="verify")
        found = []
        while 0 in ahead:
            found += ahead.finish_groups(0, len(found) // SAMPLES)
    assert {span.version for one in found for span in one.weight_versions} == {"1"}
    assert [record(one) for one in found] == [record(one) for one in engine.generate(*batch(0))]
    engine.close()


def test_keep_returns_the_tokens_of_older_weights_with_their_versions(make_engine, weights):
    expected = synchronous(make_engine, weights())
    model = weights()
    engine = make_engine(model)
    with engine.model.rollout_phase():
        steps = run_ahead(engine, model, 1, RolloutsAhead(engine, "keep"))
    numbers = {"default": 0} | {str(step): step for step in range(NUM_BATCHES)}
    versions = [[{numbers[span.version] for span in one.weight_versions} for one in step] for step in steps]
    assert all(step - 1 <= min(of_one) <= step for step, each in enumerate(versions) for of_one in each)
    assert any(min(of_one) < step for step, each in enumerate(versions) for of_one in each)
    assert [[record(one) for one in step] for step in steps] != expected
    assert engine.metrics.num_verified_tokens == 0
    engine.close()


def test_drop_draws_groups_anew_that_are_too_old(make_engine, weights):
    expected = synchronous(make_engine, weights())
    model = weights()
    engine = make_engine(model)
    ahead = RolloutsAhead(engine, "drop", 0)
    with engine.model.rollout_phase():
        steps = run_ahead(engine, model, 2, ahead)
    assert [[record(one) for one in step] for step in steps] == expected  # nothing of older weights is left
    assert ahead.counts.num_dropped_tokens > 0
    engine.close()


def repeat(engine, model, steps: list[list[Completion]], num_ahead: int) -> list[list[Completion]]:
    """Run again with the schedule of a run."""
    ahead, repeated = RolloutsAhead(engine, "keep"), []
    for step in range(NUM_BATCHES):
        for coming in range(step, min(step + num_ahead + 1, NUM_BATCHES)):
            if coming not in ahead:
                ahead.begin(coming, *batch(coming), schedule=schedule_of(steps[coming]))
        repeated.append(ahead.finish(step))
        ahead.settle()
        train_and_commit(engine, model, step, in_flight=None)
    return repeated


def schedule_of(answers: list[Completion]) -> list[list[list[tuple[str, int]]]]:
    spans = [[(span.version, span.end - span.start) for span in one.weight_versions] for one in answers]
    return [spans[at : at + SAMPLES] for at in range(0, len(spans), SAMPLES)]


@pytest.mark.parametrize("settings", [{}, {"speculation": "off", "overlap": True}, {"stages": 2}])
@pytest.mark.parametrize("policy", [("keep",), ("drop", 1)])
def test_a_run_that_was_timed_is_repeated_from_its_schedule(make_engine, weights, policy, settings):
    model = weights()
    engine = make_engine(model, **settings)
    draw = random.Random(1)

    def train_for_some_steps() -> None:
        for _ in range(draw.choice([0, 2, 9])):
            engine.step()

    with engine.model.rollout_phase():
        steps = run_ahead(engine, model, 2, RolloutsAhead(engine, *policy), train_for_some_steps)
    engine.close()
    model = weights()
    engine = make_engine(model, **settings)
    with engine.model.rollout_phase():
        repeated = repeat(engine, model, steps, 2)
        assert not engine.has_work
        engine.check_integrity()
    engine.close()
    assert [[record(one) for one in step] for step in repeated] == [[record(one) for one in step] for step in steps]
    assert any(len(one.weight_versions) > 1 for step in steps for one in step)


def test_a_schedule_of_another_run_is_noticed(make_engine, weights):
    engine = make_engine(weights())
    prompts, params = batch(0)
    ahead = RolloutsAhead(engine, "keep")
    with pytest.raises(ValueError, match="4 prompts, but a schedule of 1"):
        ahead.begin(0, prompts, params, schedule=[[]])
    with pytest.raises(ValueError, match="a schedule is of samples with a seed: 1 for n=3"):
        ahead.begin(0, prompts, params, schedule=[[[("default", 3)]]] * 4)
    with engine.model.rollout_phase():
        ahead.begin(0, prompts, params, schedule=[[[("default", 1)]] * SAMPLES] * PROMPTS)
        with pytest.raises(ReplayDiverged, match="has 2 tokens after version default, and 1 in the schedule"):
            ahead.finish(0)
    engine.close()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("v9", 3)], r"sample 0 of a prompt of \d+ tokens: its token 0 is of 'v9', .* finished under 'default'"),
        ([("default", 2), ("v9", 3)], r"sample 0 of a prompt of \d+ tokens: its token 2 is of 'v9'"),
        ([], r"sample 0 of a prompt of \d+ tokens: its token 0 is of 'no version'"),
    ],
)
def test_a_schedule_whose_weights_do_not_come_is_named_and_waits_for_nothing(make_engine, weights, spans, message):
    engine = make_engine(weights())
    prompts, params = batch(0)
    params = [replace(one, max_new_tokens=5, min_new_tokens=0) for one in params]
    ahead = RolloutsAhead(engine, "keep")
    with engine.model.rollout_phase():
        ahead.begin(0, prompts, params, schedule=[[spans] * SAMPLES] * PROMPTS)
        with pytest.raises(ReplayDiverged, match=message):
            ahead.finish(0)
    engine.close()


def test_a_schedule_may_name_one_version_twice_in_a_row(make_engine, weights):
    engine = make_engine(weights())
    prompts, params = batch(0)
    params = [replace(one, max_new_tokens=6, min_new_tokens=0) for one in params]
    with engine.model.rollout_phase():
        answers = []
        for parts in (1, 2):
            ahead = RolloutsAhead(engine, "keep")
            schedule = [[[("default", 6 // parts)] * parts] * SAMPLES] * PROMPTS
            ahead.begin(0, prompts, params, schedule=schedule)
            answers.append([one.token_ids for one in ahead.finish(0)])
    assert answers[0] == answers[1]
    engine.close()


def test_an_answer_goes_on_from_its_beginning(make_engine, weights):
    engine = make_engine(weights())
    params = SamplingParams(max_new_tokens=12, sampling_seed=4, ignore_eos=True)
    [whole] = engine.generate([[3, 4, 5]], params)
    [part] = engine.generate([[3, 4, 5]], replace(params, max_new_tokens=5))
    begun = Begun(part.token_ids, part.logprobs, (("default", None, 0),), part.drawn_with.seed, 0)
    [rest] = engine.generate([[3, 4, 5]], params, options=RequestOptions(begun=begun))
    assert record(rest) == record(whole)
    assert [record(one) for one in engine.renew([rest])] == [record(whole)]
    for wrong, message in (
        (replace(begun, token_ids=(1,) * 12, logprobs=(0.0,) * 12), "fewer tokens than max_new_tokens=12, not 12"),
        (replace(begun, logprobs=()), "a log-probability for each of its 5 tokens"),
        (replace(begun, token_ids=(-1,) * 5), r"names tokens below 1024, not \[-1, -1"),
        (replace(begun, spans=()), "from which weights its first token came"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([[3, 4, 5]], params, options=RequestOptions(begun=wrong))
    with pytest.raises(ValueError, match="no alternatives"):
        engine.generate([[3, 4, 5]], params, options=RequestOptions(begun=begun, top_logprobs_num=1))
    engine.close()


def test_what_cannot_be_begun_is_refused_by_name_and_leaves_nothing(make_engine, weights):
    engine = make_engine(weights())
    ahead = RolloutsAhead(engine)
    prompts, params = batch(0)
    ahead.begin(0, prompts, params)
    with pytest.raises(ValueError, match="batch 0 has been begun already"):
        ahead.begin(0, prompts, params)
    with pytest.raises(ValueError, match="4 prompts, but 3 params and 4 options"):
        ahead.begin(1, prompts, params[1:])
    with pytest.raises(ValueError, match="prompt token ids must be integers"):
        ahead.begin(1, [*prompts[1:], [10**6]], params)
    with pytest.raises(ValueError, match="logit_bias names tokens"):
        ahead.begin(1, prompts, [*params[1:], SamplingParams(logit_bias={10**6: 1.0})])
    with pytest.raises(ValueError, match="params and options are lists, of one for each prompt"):
        ahead.begin(1, prompts, SamplingParams())
    with pytest.raises(KeyError, match="batch 1 was not begun, or is finished already; begun and not finished: 0"):
        ahead.finish(1)
    assert 1 not in ahead
    with pytest.raises(ValueError, match="max_lag goes with on_commit"):
        RolloutsAhead(engine, "drop")
    with pytest.raises(ValueError, match="max_lag goes with on_commit"):
        RolloutsAhead(engine, "verify", 2)
    ahead.close()
    assert 0 not in ahead
    assert not engine.has_work
    engine.close()


def test_a_loop_that_ends_with_an_error_ends_the_wait_for_a_batch(make_engine, weights, monkeypatch):
    engine = make_engine(weights())
    ahead = RolloutsAhead(engine)

    def fail(*_):
        raise RuntimeError("broken on purpose")

    with engine.model.rollout_phase():
        ahead.begin(0, *batch(0))
        monkeypatch.setattr(engine.gate, "step", fail)
        engine.start()
        with pytest.raises(EngineStopped):
            ahead.finish(0)
    monkeypatch.undo()
    engine.close()


def test_an_engine_is_closed_while_its_rollouts_wait_for_their_turn(weights) -> None:
    engine = Engine(weights(), EngineConfig(kv_cache="64 blocks", max_num_seqs=2))
    ahead = RolloutsAhead(engine)
    params = SamplingParams(max_new_tokens=40, n=2, sampling_seed=1, ignore_eos=True)
    for key in range(3):
        ahead.begin(key, [[1, 2, 3], [4, 5, 6]], [params, params])
    engine.close()
    assert engine.driver.is_closed
    with pytest.raises(EngineStopped):
        ahead.finish(0)
