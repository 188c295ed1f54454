"""Sampling parameters: names, defaults, ranges, and errors that name all wrong fields at once."""

import json
import math
import pickle

import pytest

from lockstep.rollout.sampling_params import SamplingParams


def test_defaults_are_those_of_the_wire():
    params = SamplingParams.from_dict({})
    assert params == SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (
        128,
        1,
        1,
        -1,
        0,
    )
    assert (params.stop, params.stop_token_ids, params.stop_regex, params.logit_bias) == ((), (), (), None)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0, 0, 1)
    assert (params.min_new_tokens, params.n, params.sampling_seed, params.stream_interval) == (
        0,
        1,
        None,
        None,
    )
    assert (params.ignore_eos, params.no_stop_trim, params.custom_params) == (False, False, None)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True)


def test_null_is_the_default_for_every_field_and_for_grammars():
    names = [
        *SamplingParams.__dataclass_fields__,
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "beam_width",
    ]
    assert SamplingParams.from_dict(dict.fromkeys(names)) == SamplingParams()


def test_lists_become_tuples_and_string_keys_integers():
    params = SamplingParams.from_dict(
        {
            "stop": "END",
            "stop_token_ids": [3, 4],
            "stop_regex": [r"\d{3}"],
            "logit_bias": {"17": -1, "5": 2.5},
        }
    )
    assert (params.stop, params.stop_token_ids, params.stop_regex) == (("END",), (3, 4), (r"\d{3}",))
    assert params.logit_bias == {17: -1, 5: 2.5}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert pickle.loads(pickle.dumps(params)) == params


def test_greedy_and_penalties_are_asked_by_property():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-7).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams().needs_penalties
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).needs_penalties
    assert SamplingParams(stop="x").needs_text
    assert SamplingParams(stop_regex="x").needs_text
    assert not SamplingParams(stop_token_ids=[1]).needs_text


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_new_tokens", [0, 1, 10**6], [-1, 1.0, True, "8"]),
        ("stop", ["a", "", ["a"] * 32, []], [["a"] * 33, [""], [1], 5]),
        ("stop_token_ids", [[], [0, 5]], [[-1], ["5"], [True], 5]),
        ("stop_regex", ["a+", "x" * 256], ["x" * 257, "é" * 129, "(", "a*", ["b"] * 33, [None]]),
        ("temperature", [0, 0.0, 2, 1e-320, 1e6], [-0.1, 1.1e6, 1e39, 1e308, math.nan, math.inf, True, "1"]),
        ("top_p", [1e-9, 1], [0, 1.0001, -0.5, math.nan, False]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.5, True, False]),
        ("min_p", [0, 1], [-0.1, 1.1, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("repetition_penalty", [1e-6, 0.01, 2], [0, 1e-44, 9e-7, 2.1, math.nan]),
        ("min_new_tokens", [0, 128], [-1, 129, 0.0]),
        ("n", [1, 64, 65_536], [0, -1, True, 2.0, 65_537, 10**7]),
        ("ignore_eos", [True, False], [0, 1, "true"]),
        ("skip_special_tokens", [True, False], [0, 1]),
        ("spaces_between_special_tokens", [True, False], [0, 1]),
        ("no_stop_trim", [True, False], [0, 1]),
        ("stream_interval", [1, 50], [0, True, 1.5]),
        (
            "logit_bias",
            [{}, {"1": 2}, {1: -math.inf}],
            [{"x": 1}, {"-1": 1}, {"1": math.nan}, {"1": True}, [1]],
        ),
        ("sampling_seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True]),
        ("custom_params", [{}, {"a": [1]}], [[], "x"]),
        ("json_schema", ["{}", {}], ["", 1, []]),
        ("regex", ["a+"], ["", 1, {}]),
        ("ebnf", ['root ::= "a"'], ["", {}]),
        ("structural_tag", ["{}", {}], ["", 1]),
        ("jump_forward", ["text", "exact", "off"], ["on", True]),
    ],
)
def test_ranges(name, good, bad):
    for value in good:
        SamplingParams.from_dict({name: value})
    for value in bad:
        with pytest.raises(ValueError, match=name):
            SamplingParams.from_dict({name: value})
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_beams_are_refused_by_name():
    with pytest.raises(ValueError, match="beam_width is not supported yet"):
        SamplingParams.from_dict({"beam_width": 2})


def test_one_grammar_at_most_constrains_an_output():
    with pytest.raises(ValueError, match="json_schema, regex: only one"):
        SamplingParams(json_schema="{}", regex="a")
    assert SamplingParams(regex="a").is_constrained and not SamplingParams().is_constrained


def test_schemas_and_structural_tags_may_be_objects():
    schema = {"type": "object", "properties": {"città": {"type": "integer"}}}
    assert json.loads(SamplingParams.from_dict({"json_schema": schema}).json_schema) == schema
    assert json.loads(SamplingParams(structural_tag={"type": "x"}).structural_tag) == {"type": "x"}


def test_every_offender_is_named_at_once():
    with pytest.raises(ValueError, match="sampling parameters") as caught:
        SamplingParams.from_dict({"temprature": 1, "seed": None, "ebnf": "", "top_p": 3, "n": True, "stop": [""]})
    message = str(caught.value)
    for offender in ("'temprature'", "'seed'", "ebnf", "top_p", "n must be", "stop must be"):
        assert offender in message
    assert message.count("sampling parameters") == 1


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_half_of_a_surrogate_pair_in_a_stop_is_named_beside_the_other_wrong_fields():
    with pytest.raises(ValueError) as caught:
        SamplingParams(stop="\ud800", stop_regex=["a", "b\udc00"], top_p=2)
    message = str(caught.value)
    assert r"stop must be a non-empty string or a list of at most 32" in message and r"('\ud800',)" in message
    assert r"stop_regex must be a pattern" in message and r"'b\udc00'" in message and "top_p must be" in message
