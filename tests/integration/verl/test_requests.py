"""Requests and answers in verl's form."""

import types

import pytest

from lockstep.integration.verl.requests import read_answer, request_body


def config(**changed):
    values = {"response_length": 16, "prompt_length": 32, "full_determinism": False, "seed": 7}
    return types.SimpleNamespace(**(values | changed))


def body(params, prompt=(1, 2, 3), context=100, **changed):
    return request_body(config(**changed), context, prompt, params, "id")


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({}, 16),
        ({"max_new_tokens": 5, "max_tokens": 6}, 5),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 500}, 97),  # what the context has room for
    ],
)
def test_an_answer_is_as_long_as_asked_for_or_as_the_settings_say(params, most):
    made = body({"temperature": 0.7, "logprobs": True, **params})
    assert made["sampling_params"] == {"temperature": 0.7, "max_new_tokens": most}
    assert made["input_ids"] == [1, 2, 3] and made["return_logprob"] and made["rid"] == "id"


def test_later_turns_of_a_conversation_have_what_is_left_of_prompt_and_response():
    assert body({}, prompt=range(40))["sampling_params"]["max_new_tokens"] == 8


def test_a_prompt_that_fills_the_context_is_refused_by_name():
    with pytest.raises(ValueError, match="request id: a prompt of 3 tokens fills the context of 3"):
        body({}, context=3)


def test_a_deterministic_run_gives_each_request_its_own_seed_and_the_same_one_again():
    seeds = [request_body(config(full_determinism=True), 100, [1], {}, name)["sampling_params"] for name in "aab"]
    assert seeds[0] == seeds[1] != seeds[2]
    assert all(0 <= one["sampling_seed"] < 1 << 31 for one in seeds)


def test_an_answer_names_the_steps_whose_weights_drew_it():
    meta = {
        "output_token_logprobs": [(-0.5, 4, None), (-1.5, 5, None)], "finish_reason": {"type": "abort"},
        "cached_tokens": 2, "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }  # fmt: skip
    assert read_answer({"output_ids": [4, 5], "meta_info": meta}) == {
        "token_ids": [4, 5], "log_probs": [-0.5, -1.5], "stop_reason": "abort",
        "extra_fields": {
            "num_cached_tokens": 2, "global_steps": 4, "min_global_steps": 3, "max_global_steps": 4,
        },
    }  # fmt: skip


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_prompt_have_a_row_for_each_of_its_tokens(top):
    asked = body({"prompt_logprobs": top})
    assert (asked["logprob_start_len"], asked["top_logprobs_num"]) == (0, top)
    meta = {
        "output_token_logprobs": [], "finish_reason": {"type": "length"}, "cached_tokens": 0, "weight_versions": [],
        "weight_version": "default", "input_token_logprobs": [(None, 1, None), (-1.0, 2, None), (-2.0, 3, None)],
    }  # fmt: skip
    if top:
        meta["input_top_logprobs"] = [None, [(-1.0, 2, None), (-3.0, 9, None)], [(-0.1, 8, None), (-2.0, 3, None)]]
    further = read_answer({"output_ids": [], "meta_info": meta})["extra_fields"]
    if top:
        assert further["prompt_ids"] == [[2, 9], [8, 3], [0, 0]]
        assert further["prompt_logprobs"] == [[-1.0, -3.0], [-0.1, -2.0], [0.0, 0.0]]
    else:
        assert further["prompt_ids"] == [[2], [3], [0]] and further["prompt_logprobs"] == [[-1.0], [-2.0], [0.0]]
    assert "global_steps" not in further  # no step of verl's has drawn anything
