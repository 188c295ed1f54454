"""Micro-batches by rows, by number and by bytes; samples without a gradient are apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sampling import RolloutSettings
from lockstep.integration.grpo.settings.sections import RunSettings
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.activations import ActivationBytes, kept_bytes, measure
from lockstep.integration.grpo.training.checkpointing import switch_on
from lockstep.integration.grpo.training.microbatches import Microbatch, even_microbatches, microbatches, rows_of
from lockstep.integration.grpo.training.packing import Sample
from lockstep.rollout.model.hosted_model import HostedModel

A = Sample((1, 2, 3), (4, 5), (-0.1, -0.2), 1.0)  # 4 rows
B = Sample((6,), (7, 8, 9), (-0.3, -0.4, -0.5), -2.0)  # 3 rows
Z = Sample((6,), (7, 8), (-0.3, -0.4), 0.0)  # 2 rows, no gradient
LONG_Z = Sample((6,), (7, 8, 9, 9, 9), (-0.3,) * 5, 0.0)  # 5 rows, no gradient


def learns(sample: Sample) -> bool:
    return sample.has_gradient(always=False)


def of_rows(num_rows: int, advantage: float = 1.0) -> Sample:
    return Sample((1,), (2,) * num_rows, (-0.1,) * num_rows, advantage)


def by_rows(samples, limit):
    return list(microbatches(samples, limit, rows_of, learns))


def test_they_keep_order_and_bound_rows_except_for_one_long_sample():
    assert by_rows([A, B, A], 7) == [Microbatch([A, B], True), Microbatch([A], True, is_last=True)]
    assert by_rows([A, B], 3) == [Microbatch([A], True), Microbatch([B], True, is_last=True)]
    assert by_rows([], 3) == []


def test_samples_without_a_gradient_are_apart_and_never_last():
    assert by_rows([A, Z, B, Z], 7) == [Microbatch([Z, Z], False), Microbatch([A, B], True, is_last=True)]
    assert by_rows([A, Z, A, Z, Z], 4) == [
        Microbatch([A], True), Microbatch([Z, Z], False), Microbatch([Z], False), Microbatch([A], True, is_last=True)
    ]  # fmt: skip


def test_a_step_without_a_gradient_has_one_backward_pass_of_its_shortest_sample():
    assert by_rows([LONG_Z, Z, LONG_Z], 100) == [
        Microbatch([LONG_Z, LONG_Z], False), Microbatch([Z], True, is_last=True)
    ]  # fmt: skip
    assert list(even_microbatches([LONG_Z, Z], 4, learns)) == [
        Microbatch([LONG_Z], False), Microbatch([Z], True, is_last=True)
    ]  # fmt: skip


def test_where_none_has_to_be_the_last_a_full_one_does_not_wait_for_the_next_sample():
    taken, samples = [], [A, A, Z, B]

    def come():
        for one in samples:
            taken.append(one)
            yield one

    parts = []
    for part in microbatches(come(), 4, rows_of, learns, needs_last=False):
        parts.append((len(taken), part))
    assert parts == [
        (1, Microbatch([A], True)), (2, Microbatch([A], True)), (4, Microbatch([Z], False)),
        (4, Microbatch([B], True, is_last=True)),
    ]  # fmt: skip
    full = microbatches([A, Z], 4, rows_of, learns, needs_last=False)
    assert list(full) == [Microbatch([A], True), Microbatch([Z], False)]  # the one with a gradient has gone ahead
    none = microbatches([Z, Z], 2, rows_of, learns, needs_last=False)
    assert list(none) == [Microbatch([Z], False), Microbatch([Z], True, is_last=True)]


@pytest.mark.parametrize(
    ("sample", "with_kl", "expected"),
    [
        (A, False, True),
        (Z, False, False),
        (Z, True, True),
        (Sample((1,), (2,), (-0.1,), 1.0, counts=False), False, False),
        (Sample((1,), (2,), (-0.1,), 1.0, counts=False), True, False),
        (Sample((1,), (2,), (-0.1,), float("nan")), False, True),
    ],
)
def test_a_sample_has_a_gradient_by_its_advantage_or_by_the_kl(sample, with_kl, expected):
    assert sample.has_gradient(always=with_kl) is expected


def test_a_number_of_micro_batches_has_samples_spread_evenly_by_tokens():
    nine, seven, two, one = (of_rows(number) for number in (9, 7, 2, 1))
    # 9; 7; 2 to the 7; 1 to either of two that have 9: the first
    assert list(even_microbatches([one, seven, nine, two], 2, learns)) == [
        Microbatch([one, nine], True), Microbatch([seven, two], True, is_last=True)
    ]  # fmt: skip
    idle = of_rows(6, advantage=0.0)
    assert list(even_microbatches([seven, idle, idle, two], 2, learns)) == [
        Microbatch([idle], False), Microbatch([idle], False), Microbatch([seven], True),
        Microbatch([two], True, is_last=True),
    ]  # fmt: skip
    assert len(list(even_microbatches([one, two], 8, learns))) == 2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0])), max_size=12),
    st.integers(1, 20),
)
def test_it_makes_no_other_micro_batches_where_none_has_to_be_the_last(shapes, size):
    samples = [of_rows(rows, advantage) for rows, advantage in shapes]
    found = {}
    for needs_last in (False, True):
        parts = list(microbatches(samples, size, rows_of, learns, needs_last=needs_last))
        found[needs_last] = {kind: [part.samples for part in parts if part.learns is kind] for kind in (False, True)}
    assert found[False] == found[True]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0])), max_size=12),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_sample_is_in_one_micro_batch_and_the_last_one_has_a_backward_pass(shapes, size, is_even):
    samples = [of_rows(rows, advantage) for rows, advantage in shapes]
    parts = list(even_microbatches(samples, size, learns)) if is_even else by_rows(samples, size)
    found = sorted(id(sample) for part in parts for sample in part.samples)
    assert found == sorted(id(sample) for sample in samples)
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True] * bool(parts)
    assert all(part.learns for part in parts[-1:])
    for part in parts:
        assert is_even or len(part.samples) == 1 or sum(sample.num_rows for sample in part.samples) <= size
        assert part.learns == learns(part.samples[0]) or not any(map(learns, samples))
        assert len({learns(sample) for sample in part.samples}) == 1
    if is_even:
        sizes = [sum(sample.num_rows for sample in part.samples) for part in parts if part.learns]
        assert not sizes or max(sizes) - min(sizes) <= max(sample.num_rows for sample in samples)


def test_a_sample_costs_the_bytes_of_its_rows_and_of_its_logits():
    costs = ActivationBytes(per_row=10.0, per_target=100.0)
    assert costs.of(A, A.num_rows) == 240.0 and costs.of(B, B.num_rows) == 330.0
    assert costs.of(A, 1) == 210.0, "rows that other samples have already cost nothing"
    assert list(microbatches([A, B, A], 580, costs.of, learns)) == [
        Microbatch([A, B], True), Microbatch([A], True, is_last=True)
    ]  # fmt: skip
    episode = Sample((1,), (2, 3, 4), (-0.1, -0.1), 1.0, sampled=(True, False, True))
    assert costs.of(episode, episode.num_rows) == 230.0


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_what_small_forwards_keep_foretells_what_a_large_one_keeps(make_model, family, is_checkpointed):
    model = make_model(family)
    hosted = HostedModel.adopt(model, dtype=None, device=None, invariant=True)
    whole = measure(hosted)
    assert not model.training, "its flags are as before"
    costs = whole
    if is_checkpointed:
        switch_on(model)
        costs = measure(hosted)
        assert costs.per_row < whole.per_row
    assert costs == measure(hosted), "the estimate is the same in every run"
    model.train()
    num_rows, num_targets = 400, 250
    gradient_of_logits = num_targets * 256 * 4
    expected = num_rows * costs.per_row + num_targets * costs.per_target - gradient_of_logits
    found = kept_bytes(hosted, num_rows, num_targets)
    if is_checkpointed:  # a layer that runs again is in the estimate, and not in what a forward keeps
        model.eval()
        found += (kept_bytes(hosted, num_rows, num_targets) - found) / model.config.num_hidden_layers
    assert found == pytest.approx(expected, rel=0.1)


def test_the_sizes_of_micro_batches_exclude_each_other_by_name():
    def faults(**given) -> list[str]:
        return [f"{key} {why}" for key, why in TrainSettings(**given).faults()]

    assert faults(microbatch_tokens=9) == faults(gradient_accumulation_steps=4) == faults(microbatch_bytes="1GiB") == []
    assert faults(microbatch_tokens=9, gradient_accumulation_steps=4) == [
        "gradient_accumulation_steps must not be set with train.microbatch_tokens: both say how large micro-batches are"
    ]
    found = faults(gradient_accumulation_steps=4, microbatch_bytes="1GiB", microbatch_tokens=1)
    assert [one.split()[0] for one in found] == ["gradient_accumulation_steps", "microbatch_bytes"]
    assert faults(microbatch_bytes="lots") == ["""microbatch_bytes must be bytes ("512MiB"), not 'lots'"""]
    assert "microbatch_tokens must not be negative" in faults(microbatch_tokens=-1)[0]
    assert TrainSettings().num_microbatch_rows == 16384
    assert TrainSettings(microbatch_bytes="1.5GiB").num_microbatch_bytes == 3 << 29


def test_more_micro_batches_than_samples_are_refused():
    rollout = RolloutSettings(prompts_per_step=2, group_size=4)
    JobConfig(RunSettings("x"), rollout=rollout, train=TrainSettings(gradient_accumulation_steps=8))
    with pytest.raises(ValueError, match=r"train\.gradient_accumulation_steps must be at most the 8 samples"):
        JobConfig(RunSettings("x"), rollout=rollout, train=TrainSettings(gradient_accumulation_steps=9))
