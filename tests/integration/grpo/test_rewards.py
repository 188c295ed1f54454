import sys

import pytest

from lockstep.integration.grpo.rewards import exact_answer, load_reward


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module that can be imported during the test, and return its name."""

    def write(source):
        name = f"user_rewards_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    yield write
    sys.modules.pop(f"user_rewards_{tmp_path.name}", None)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("12 13 06=632", "632", 1.0),
        ("632", "632", 1.0),
        (" x = 1\n= 632 \n", " 632", 1.0),
        ("12 13 06=0632", "632", 0.0),
        ("632=", "632", 0.0),
        ("632=631", "632", 0.0),
        ("", "632", 0.0),
        ("x=y", "x=y", 1.0),
    ],
)
def test_exact_answer_reads_what_follows_the_last_equals_sign(completion, answer, expected):
    assert exact_answer("What is 347 + 285?\n", completion, answer) == expected


def test_a_loaded_reward_gives_floats(user_module):
    name = user_module(
        "class Judge:\n    @staticmethod\n    def score(p, c, a):\n        return len(p) + len(c) + len(a)\n"
    )
    value = load_reward(f"{name}:Judge.score")("p", "cc", "aaa")
    assert value == 6.0 and isinstance(value, float)


def test_the_default_reward_can_be_loaded_by_name():
    assert load_reward("lockstep.integration.grpo.rewards:exact_answer")("", "7", "7") == 1.0


def test_the_old_place_of_the_default_reward_is_accepted_with_a_warning(caplog):
    with caplog.at_level("WARNING", logger="lockstep"):
        assert load_reward("lockstep.integration.rewards:exact_answer")("", "7", "7") == 1.0
    assert "has moved: write 'lockstep.integration.grpo.rewards:exact_answer'" in caplog.text
    with pytest.raises(ValueError, match=r"cannot import 'lockstep\.integration\.rewards'"):
        load_reward("lockstep.integration.rewards:another")


@pytest.mark.parametrize("result", ["float('nan')", "float('inf')", "-float('inf')", "None", "'1.0'", "[1.0]"])
def test_results_that_are_not_finite_numbers_are_refused_by_name(user_module, result):
    name = user_module(f"def score(p, c, a):\n    return {result}\n")
    with pytest.raises(ValueError, match=f"{name}:score.* returned .*not a (finite )?number"):
        load_reward(f"{name}:score")("p", "c", "a")


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("no_colon", "'module:function' is needed"),
        (":score", "'module:function' is needed"),
        ("module:", "'module:function' is needed"),
        ("no_such_module_anywhere:score", "cannot import 'no_such_module_anywhere'"),
        ("math:no_such_function", "'math' has no 'no_such_function'"),
        ("math:pi", "a float cannot be called"),
        (".relative:score", "must be an absolute module name"),
    ],
)
def test_a_reward_that_cannot_be_found_is_named_in_one_line(location, reason):
    with pytest.raises(ValueError) as error:
        load_reward(location)
    assert repr(location) in str(error.value) and reason in str(error.value) and "\n" not in str(error.value)


def test_a_module_with_a_syntax_error_is_named_with_its_line(user_module):
    name = user_module("x = 1\ndef score(:\n")
    with pytest.raises(ValueError, match=rf"{name}:score.*{name}\.py:2: "):
        load_reward(f"{name}:score")
