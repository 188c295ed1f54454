"""Bad prompts, settings and ids: each is named, and nothing is queued."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch

from lockstep.rollout.request_options import RequestOptions
from lockstep.tests.rollout.engine.callers import assert_idle, sampled


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 256], r"from 0 to 255, not \[256\]"),
        ([-1], r"not \[-1\]"),
        ([1, 2.5], r"not \[2.5\]"),
        ([1, True], r"not \[True\]"),
        ([[]], "empty"),
        ("text", "needs a tokenizer"),
        ([None], "NoneType"),
        ([[1], None], "NoneType"),
        ([[1], 5], "int"),
        (5, "a prompt is a text or a list of token ids, not int 5"),
        (b"a", "not bytes b'a'"),
        ([b"a"], "not bytes b'a'"),
        ({"text": "a"}, "images and other inputs"),
    ],
    ids=str,
)
def test_bad_prompt_is_named_and_nothing_is_queued(make_engine, prompt, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, sampled())
    assert_idle(engine)
    assert len(engine.mailboxes) == 0


@pytest.mark.parametrize(
    "given",
    [array("i", [1, 2, 3]), (1, 2, 3), np.array([[1, 2, 3], [4, 5]], dtype=object), [array("q", [1, 2, 3])]],
    ids=str,
)
def test_arrays_of_integers_and_of_prompts_are_taken(make_engine, given):
    engine = make_engine()
    lists = [[1, 2, 3], [4, 5]] if isinstance(given, np.ndarray) else [[1, 2, 3]]
    found, expected = engine.generate(given, sampled()), engine.generate(lists, sampled())
    assert [one.prompt_ids for one in found] == [one.prompt_ids for one in expected] == [tuple(ids) for ids in lists]


@pytest.mark.parametrize("given", [np.array([1, 2]), np.array([[1, 2], [3, 4]]), torch.tensor([1, 2])], ids=str)
def test_tensors_and_arrays_of_numbers_are_refused_with_the_remedy(make_engine, given):
    engine = make_engine()
    with pytest.raises(ValueError, match=rf"(?s)not {type(given).__name__} .*tolist\(\) makes a list of it"):
        engine.generate(given, sampled())
    assert_idle(engine)


@pytest.mark.parametrize("prompts", ["a\ud800", ["a", "b\ud800"]], ids=ascii)
def test_a_text_with_half_a_surrogate_pair_is_refused(talker, prompts):
    with pytest.raises(ValueError, match=r"^the prompt has '\\ud800', half of a surrogate pair"):
        talker.generate(prompts, sampled())
    assert_idle(talker)


def test_no_prompts_have_no_answers(make_engine):
    assert make_engine().generate([], sampled()) == []


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"unknown": 1}, None, "unknown"),
        ({"temperature": -1}, None, "temperature"),
        ({"stop": "x"}, None, "tokenizer"),
        ({"logit_bias": {"3": 1, "256": 1}}, None, r"logit_bias names tokens \[256\]"),
        ({"logit_bias": dict.fromkeys(range(256), -math.inf)}, None, "logit_bias bans all 256 tokens"),
        ({"logit_bias": dict.fromkeys(range(256), -1e300), "n": 2}, None, "logit_bias bans all 256 tokens"),
        (
            {"logit_bias": dict.fromkeys(range(255), -math.inf), "min_new_tokens": 2, "stop_token_ids": [255]},
            None,
            "logit_bias bans all 256 tokens .*, and min_new_tokens those that end the output",
        ),
        ([{}, {}], None, "1 prompts, but 2 sampling_params"),
        ({}, RequestOptions(logprob_start_len=4), "logprob_start_len 4 is beyond the 3 prompt tokens"),
    ],
)
def test_bad_setting_is_named_and_nothing_is_queued(make_engine, params, options, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate([1, 2, 3], params, options=options)
    assert_idle(engine)


def test_a_bias_that_bans_all_tokens_but_one_draws_that_token(make_engine):
    bans = {id: -math.inf for id in range(256) if id != 9}
    [completion] = make_engine().generate([1, 2], sampled(logit_bias=bans))
    assert set(completion.token_ids) == {9}


def test_an_equal_finite_bias_on_all_tokens_changes_no_token(make_engine):
    engine = make_engine()
    biased = engine.generate([1, 2], sampled(logit_bias=dict.fromkeys(range(256), -8.0), sampling_seed=1))
    assert biased[0].token_ids == engine.generate([1, 2], sampled(sampling_seed=1))[0].token_ids


def test_one_bad_prompt_among_many_queues_none(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="999"):
        engine.generate([[1, 2], [3], [999]], sampled())
    assert_idle(engine)


def test_options_name_every_offender():
    with pytest.raises(ValueError, match=r"logprob_start_len.*top_logprobs_num"):
        RequestOptions(logprob_start_len=-2, top_logprobs_num=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("extra_key", 5), ("base_id", None), ("token_ids_logprob", 5), ("token_ids_logprob", ["a"])],
        *[("max_kept_ids", "a"), ("top_logprobs_num", 1.5), ("logprob_start_len", True), ("draft_token_ids", [1.5])],
    ],
)
def test_options_of_other_types_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        RequestOptions(**{name: value})


def test_no_extra_key_is_none_as_clients_write_it():
    assert RequestOptions(extra_key=None) == RequestOptions()


def test_ids_and_options_of_other_types_are_refused_before_anything_is_queued(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="a rid must be a text, not 5"):
        engine.add([1], sampled(), rid=5)
    with pytest.raises(ValueError, match="options are RequestOptions, not"):
        engine.add([1], sampled(), options={"extra_key": "a"})
    assert_idle(engine)


def test_duplicate_live_id_is_refused_and_free_again_afterwards(make_engine):
    engine = make_engine()
    engine.add([1], sampled(), rid="same")
    with pytest.raises(ValueError, match="duplicate request ID detected: same"):
        engine.add([2], sampled(), rid="same")
    engine.abort_request("same")
    assert engine.add([2], sampled(), rid="same") == ["same"]


def test_context_longer_than_the_models_is_cut_to_it_with_a_warning(make_engine, caplog):
    assert make_engine(max_model_len=512).max_model_len == 512
    assert "max_model_len" not in caplog.text
    assert make_engine(max_model_len=10_000).max_model_len == 512
    assert "max_model_len=10000 is above the model's own limit: a sequence has at most 512 tokens" in caplog.text
