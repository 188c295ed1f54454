"""The settings of a GRPOTrainer as the engine's, and the seeds of its samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.integration.trl.settings import SampleSeeds, sampling_params

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
            "max_completion_length": 20, "eos_token_ids": [2, 7]}  # fmt: skip


def trainer(generation_kwargs=None, **changes):
    """Return the attributes of a GRPOTrainer that the settings are read from."""
    return SimpleNamespace(**DEFAULTS | changes, args=SimpleNamespace(generation_kwargs=generation_kwargs))


def test_the_settings_of_the_configuration_are_the_engines():
    params = sampling_params(trainer(temperature=0.5, top_p=0.9, top_k=8, min_p=0.1, repetition_penalty=1.2), 64)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 8, 0.1)
    assert (params.repetition_penalty, params.max_new_tokens, params.stop_token_ids) == (1.2, 20, (2, 7))
    assert sampling_params(trainer(), 64).top_k == -1


def test_completions_without_a_limit_end_with_the_context():
    assert sampling_params(trainer(max_completion_length=None), 64).max_new_tokens == 64


def test_generation_kwargs_override_the_configuration():
    given = {"top_p": 0.8, "stop_strings": ["."], "min_new_tokens": 2, "stop_token_ids": [9], "do_sample": True}
    params = sampling_params(trainer(given), 64)
    assert (params.top_p, params.stop, params.min_new_tokens, params.stop_token_ids) == (0.8, (".",), 2, (2, 7, 9))


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"num_beams": 4, "penalty_alpha": 1}, "generation_kwargs: num_beams, penalty_alpha: the engine has"),
        ({}, {"temperature": 0.5}, r"temperature is not that of GRPOConfig \(1.0\)"),
        ({}, {"do_sample": False}, "do_sample=False"),
        ({"temperature": 0.0}, None, "temperature=0.0: TRL divides"),
        ({}, {"top_p": 1.5}, "top_p must be"),
    ],
)
def test_settings_that_the_engine_does_not_have_are_refused_by_name(changes, given, message):
    with pytest.raises(ValueError, match=message):
        sampling_params(trainer(given, **changes), 64)


def test_seeds_follow_from_seed_mode_step_generation_and_place():
    seeds = SampleSeeds()
    first = seeds.next(1, "train", 0, range(4))
    again = seeds.next(1, "train", 0, range(4))
    others = [
        seeds.next(1, "eval", 0, range(4)),
        seeds.next(1, "train", 1, range(4)),
        seeds.next(2, "train", 2, range(4)),
    ]
    everything = [*first, *again, *(seed for found in others for seed in found)]
    assert len(set(everything)) == len(everything)
    assert SampleSeeds().next(1, "train", 0, range(2, 4)) == first[2:]  # the second of two processes
    assert SampleSeeds().next(1, "train", 1, range(4)) == others[1]  # a run that was resumed at this step


def test_an_evaluation_that_was_forgotten_draws_the_same_seeds():
    seeds = SampleSeeds()
    first = seeds.next(0, "eval", 5, range(2))
    seeds.forget("eval")
    assert seeds.next(0, "eval", 5, range(2)) == first
