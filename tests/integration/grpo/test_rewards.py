import sys

import pytest

from lockstep.integration.grpo.rewards.loading import READY, load_reward
from lockstep.integration.grpo.rewards.ready import exact_answer, follows_schema, matches, short_enough
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.rewards.scorer import Scorer
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.rollout.completion import Completion, FinishReason


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


ROWS = [{"prompt": f"p{n}", "answer": str(n), "wanted": n} for n in range(3)]
PROBLEMS = [Problem(row["prompt"], row["answer"], f"rows.jsonl:{n + 1}", row) for n, row in enumerate(ROWS)]
FORMS = """
import asyncio
async def late(row, completion):
    await asyncio.sleep(0)
    return row["wanted"] + len(completion)
def plain(row, completion):
    return row["wanted"] + len(completion)
def texts(prompt, completion, answer):
    return int(answer) + len(completion)
def many(rows, completions):
    return [row["wanted"] + len(text) for row, text in zip(rows, completions)]
async def many_late(rows, completions):
    return many(rows, completions)
class Judge:
    def __call__(self, row, completion):
        return row["wanted"] + len(completion)
    @staticmethod
    def static(p, c, a):
        return int(a) + len(c)
judge = Judge()
def style(row, completion):
    return {"short": len(completion) < 3, "digits": completion.isdigit() * 0.5}
def judged(row, completion):
    return {"success": completion == "0", "grade": 2}
def long(row, completion, info):
    return len(info.token_ids) + info.index
def none():
    pass
def four(a, b, c, d):
    pass
def few(rows, completions):
    return [1.0]
def broken(row, completion):
    raise KeyError("gone")
def broken_many(rows, completions):
    raise KeyError("gone")
cancelled = []
async def broken_late(row, completion):
    if row["wanted"] == 1:
        await asyncio.sleep(0)
        raise ValueError("the judge is gone")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.append(row["wanted"])
        raise
"""


def completion(text: str, index: int = 0) -> Completion:
    stop = FinishReason("stop")
    return Completion(f"id-{index}", index, (1, 2), (3, 4), text, (-0.5, -0.25), stop, 0, 0, "0", None, ())


ANSWERS = [completion(text, index) for index, text in enumerate(("0", "one", "2 "))]


def test_the_default_reward_can_be_loaded_by_name():
    assert load_reward("exact_answer") is exact_answer
    expected = [Score(1.0, {}, True), Score(0.0, {}, False), Score(1.0, {}, True)]
    assert Scorer(["exact_answer"])(PROBLEMS, ANSWERS) == expected
    assert Scorer(["exact_answer"])([], []) == []


@pytest.mark.parametrize("place", ["lockstep.integration.rewards", "lockstep.integration.grpo.rewards"])
def test_the_old_places_of_the_default_reward_are_accepted_with_a_warning(caplog, place):
    with caplog.at_level("WARNING", logger="lockstep"):
        assert load_reward(f"{place}:exact_answer") is exact_answer
    assert "has moved: write 'exact_answer'" in caplog.text
    with pytest.raises(ValueError, match="another"):
        load_reward(f"{place}:another")


@pytest.mark.parametrize("name", ["late", "plain", "texts", "many", "many_late", "judge", "Judge.static"])
def test_every_form_of_a_reward_scores_each_completion(user_module, name):
    scores = Scorer([f"{user_module(FORMS)}:{name}"])(PROBLEMS, ANSWERS)
    assert scores == [Score(total) for total in (1.0, 4.0, 4.0)]
    assert all(type(score.total) is float for score in scores)


def test_components_of_several_rewards_have_weights_and_say_what_is_a_success(user_module):
    name = user_module(FORMS)
    scorer = Scorer([f"{name}:style", f"{name}:judged"], {"short": 2.0, "grade": -1.0})
    assert scorer(PROBLEMS, ANSWERS) == [
        Score(2.0 + 0.5 - 2.0, {"short": 1.0, "digits": 0.5, "success": 1.0, "grade": 2.0}, True),
        Score(0.0 + 0.0 - 2.0, {"short": 0.0, "digits": 0.0, "success": 0.0, "grade": 2.0}, False),
        Score(2.0 + 0.0 - 2.0, {"short": 1.0, "digits": 0.0, "success": 0.0, "grade": 2.0}, False),
    ]
    assert Scorer([f"{name}:judged"], {"success": 3.0})(PROBLEMS, ANSWERS)[0].total == 5.0
    assert [score.total for score in Scorer([f"{name}:long"])(PROBLEMS, ANSWERS)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "result",
    [
        "float('nan')", "float('inf')", "-float('inf')", "None", "'1.0'", "[1.0]", "10**400",
        "__import__('numpy').array([.5, .5])", "__import__('decimal').Decimal('sNaN')",
        "type('Tensor', (), {'__float__': lambda self: (_ for _ in ()).throw(RuntimeError('many'))})()",
    ],
)  # fmt: skip
def test_results_that_are_not_finite_numbers_are_refused_by_name_and_row(user_module, result):
    name = user_module(
        f"def score(p, c, a):\n    return {result}\ndef parts(row, completion):\n    return {{'part': {result}}}\n"
    )
    with pytest.raises(ValueError, match=rf"{name}:score.* returned .*not a (finite )?number, of rows.jsonl:1"):
        Scorer([f"{name}:score"])(PROBLEMS, ANSWERS)
    with pytest.raises(ValueError, match=rf"{name}:parts.* returned .* for 'part', not a (finite )?number"):
        Scorer([f"{name}:parts"])(PROBLEMS, ANSWERS)


def test_an_option_with_a_default_behind_a_row_is_no_answer(user_module):
    name = user_module("""
def option(row, completion, scale=2.0):
    return row["wanted"] * scale
def texts(prompt, completion, answer=None):
    return float(answer)
""")
    assert [score.total for score in Scorer([f"{name}:option"])(PROBLEMS, ANSWERS)] == [0.0, 2.0, 4.0]
    scaled = Scorer([f"{name}:option"], options={"option": {"scale": 3.0}})
    assert [score.total for score in scaled(PROBLEMS, ANSWERS)] == [0.0, 3.0, 6.0]
    assert [score.total for score in Scorer([f"{name}:texts"])(PROBLEMS, ANSWERS)] == [0.0, 1.0, 2.0]


def test_weights_are_of_rewards_and_of_their_components_and_one_of_neither_is_told(user_module, caplog):
    name = user_module(FORMS)
    both = Scorer([f"{name}:style"], {"style": 3.0, "short": 2.0})(PROBLEMS, ANSWERS)
    assert [score.total for score in both] == [3 * (2.0 + 0.5), 0.0, 3 * 2.0]
    with pytest.raises(ValueError, match=r"reward_weights are of exact_anwser, but the rewards are exact_answer$"):
        Scorer(["exact_answer"], {"exact_anwser": 0.5})(PROBLEMS, ANSWERS)
    scorer = Scorer([f"{name}:style"], {"shrot": 0.5, "digits": 1.0})
    scorer(PROBLEMS, ANSWERS), scorer(PROBLEMS, ANSWERS)  # a component may come later
    told = "reward_weights are of shrot, but the rewards are style, and their components so far digits, short"
    assert [record.getMessage() for record in caplog.records] == [told]
    with pytest.raises(ValueError, match=r"reward_weights must be finite numbers, not {'exact_answer': nan}"):
        Scorer(["exact_answer"], {"exact_answer": float("nan")})


def test_two_rewards_give_no_component_of_one_name(user_module):
    name = user_module(FORMS + "def other(row, completion):\n    return {'short': 1.0}\n")
    with pytest.raises(ValueError, match="two rewards give short, 'other' one of them"):
        Scorer([f"{name}:style", f"{name}:other"])(PROBLEMS, ANSWERS)


def test_rewards_that_no_advantage_can_hold_are_refused(user_module):
    name = user_module("def huge(row, completion):\n    return 1e39\ndef large(row, completion):\n    return 1e18\n")
    with pytest.raises(ValueError, match=rf"{name}:huge' returned 1e\+39, more than the 1e\+18"):
        Scorer([f"{name}:huge"])(PROBLEMS, ANSWERS)
    with pytest.raises(ValueError, match=r"1e\+19 together, more than the 1e\+18"):
        Scorer([f"{name}:large"], {"large": 10.0})(PROBLEMS, ANSWERS)


def test_wrong_forms_options_and_names_are_refused(user_module):
    name = user_module(FORMS)
    for wrong in ("none", "four"):
        with pytest.raises(ValueError, match=rf"{name}:{wrong}' takes [04] arguments"):
            Scorer([f"{name}:{wrong}"])
    with pytest.raises(ValueError, match="must return 3 values, one for each completion, not a list of 1"):
        Scorer([f"{name}:few"])(PROBLEMS, ANSWERS)
    with pytest.raises(KeyError, match=rf"gone'\nin reward '{name}:broken', sample 0 of rows.jsonl:1, '0'$"):
        Scorer([f"{name}:broken"])(PROBLEMS, ANSWERS)
    where = rf"in reward '{name}:broken_many', 3 completions, the first of them sample 0 of rows.jsonl:1, '0'"
    with pytest.raises(KeyError, match=rf"gone'\n{where}$"):
        Scorer([f"{name}:broken_many"])(PROBLEMS, ANSWERS)
    where = rf"in reward '{name}:broken_late', sample 1 of rows.jsonl:2, 'one'"
    with pytest.raises(ValueError, match=rf"^the judge is gone\n{where}$"):
        Scorer([f"{name}:broken_late"])(PROBLEMS, ANSWERS)
    assert sorted(sys.modules[name].cancelled) == [0, 2], "nothing goes on in the background"
    with pytest.raises(ValueError, match="two rewards are called 'exact_answer'"):
        Scorer(["exact_answer", "exact_answer"])
    with pytest.raises(ValueError, match="'short_enough' has no option length"):
        Scorer(["short_enough"], options={"short_enough": {"length": 3}})
    with pytest.raises(ValueError, match="reward_options are of other, but the rewards are exact_answer"):
        Scorer(["exact_answer"], options={"other": {}})


def test_ready_rewards():
    packages = {"math_verify", "reasoning_gym"}
    assert {"exact_answer", "no_reward", "matches", "follows_schema", "short_enough"} | packages == set(READY)
    assert [matches({}, text, pattern=r"\d+") for text in ("12\n", "12a", "")] == [1.0, 0.0, 0.0]
    assert matches({"form": "a+"}, "aaa", field="form") == 1.0
    with pytest.raises(ValueError, match="no text in its field 'pattern'"):
        matches({}, "a")
    with pytest.raises(ValueError, match=r"the pattern '\(' is wrong"):
        matches({}, "a", pattern="(")
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    given = [follows_schema({"schema": schema}, text) for text in ('{"n": 3}', '{"n": "3"}', "no JSON", '{"m": 1}')]
    assert given == [1.0, 0.0, 0.0, 0.0]
    assert follows_schema({}, "[1]", schema='{"type": "array"}') == 1.0
    with pytest.raises(ValueError, match="the schema is wrong"):
        follows_schema({}, "1", schema='{"type": "none"}')
    with pytest.raises(ValueError, match="no schema in its field 'schema'"):
        follows_schema({}, "1")
    assert [short_enough({}, "x" * n, target=4, slack=2) for n in (1, 4, 5, 6, 9)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="target and slack"):
        short_enough({}, "x", slack=0)
    scorer = Scorer(["matches"], options={"matches": {"pattern": "[a-z]+"}})
    assert [(score.total, score.is_success) for score in scorer(PROBLEMS, ANSWERS)] == [
        (0.0, False), (1.0, True), (0.0, False)
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["row, completion", "rows, completions"])
def test_a_reward_that_changes_nested_values_of_its_row_changes_no_other_sample(user_module, form):
    body = """
def changed(row, completion):
    row["prompt"].append({"role": "assistant", "content": completion})
    row["more"]["seen"].append(completion)
    return len(row["prompt"]) + len(row["more"]["seen"])
"""
    many = "def many(rows, completions):\n    return [*map(changed, rows, completions)]\n"
    name = user_module(body + many)
    row = {"prompt": [{"role": "user", "content": "p"}], "answer": "1", "more": {"seen": []}}
    problem = Problem("p", "1", "rows.jsonl:1", row, row["prompt"])
    scorer = Scorer([f"{name}:{'changed' if form.startswith('row,') else 'many'}"])
    assert [score.total for score in scorer([problem] * 3, ANSWERS)] == [3.0, 3.0, 3.0]
    assert problem.messages == [{"role": "user", "content": "p"}] and row["more"] == {"seen": []}


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        ("matches", "the row has no text in its field 'pattern', and the option pattern is empty"),
        ("follows_schema", "the row has no schema in its field 'schema', and the option schema is empty"),
        ("reasoning_gym", "the row is no entry of a Reasoning Gym dataset"),
    ],
)
def test_rows_that_lack_what_a_ready_reward_reads_are_known_before_the_start(reward, fault):
    if reward != "matches":
        pytest.importorskip({"follows_schema": "jsonschema"}.get(reward, reward))
    whole = {"pattern": "a+", "schema": {"type": "array"}, "answer": "1", "metadata": {"source_dataset": "x"}}
    rows = [Problem("p", "1", f"rows.jsonl:{n}", whole if n < 3 else {"question": "p"}) for n in range(1, 7)]
    Scorer([reward]).check_rows(rows[:2])
    with pytest.raises(ValueError, match=rf"^rows.jsonl:3: reward '{reward}': {fault}.*jsonl:5: .*; and 1 more$"):
        Scorer([reward]).check_rows(rows)
    if reward == "matches":
        Scorer([reward], options={reward: {"pattern": "b"}}).check_rows(rows)
        Scorer([reward], options={reward: {"field": "question"}}).check_rows(rows[2:])
    Scorer(["exact_answer", "short_enough"], options={"short_enough": {"target": 3}}).check_rows(rows)


def test_rows_with_a_wrong_schema_are_known_before_the_start():
    pytest.importorskip("jsonschema")
    schemas = [{"type": "array"}, {"type": "objekt"}, {"type": "array"}, "[1]", '{"type"']
    rows = [Problem("p", "1", f"rows.jsonl:{n}", {"schema": schema}) for n, schema in enumerate(schemas, 1)]
    wrong = "reward 'follows_schema': the schema is wrong: "
    with pytest.raises(ValueError) as error:
        Scorer(["follows_schema"]).check_rows(rows)
    assert [f"rows.jsonl:{n}: {wrong}" in str(error.value) for n in range(1, 6)] == [False, True, False, True, True]
    assert "'objekt' is not valid" in str(error.value) and "an object is needed, not a list" in str(error.value)
    with pytest.raises(ValueError, match=f"^rows.jsonl:1: {wrong}.*; and 2 more$"):
        Scorer(["follows_schema"], options={"follows_schema": {"schema": '{"type": 1}'}}).check_rows(rows)
    Scorer(["follows_schema"]).check_rows(rows[:1])


@pytest.mark.parametrize("reward", ["exact_answer", "math_verify"])
def test_rows_without_an_answer_are_known_before_the_start_where_the_reward_compares_with_it(reward):
    if reward == "math_verify":
        pytest.importorskip(reward)
    rows = [Problem("p", answer, f"rows.jsonl:{n}", {"prompt": "p"}) for n, answer in enumerate(("1", "", " \n"), 1)]
    Scorer([reward]).check_rows(rows[:1])
    with pytest.raises(ValueError, match=rf"^rows.jsonl:2: reward '{reward}': the answer is blank.*rows.jsonl:3: "):
        Scorer([reward]).check_rows(rows)
    Scorer(["short_enough"]).check_rows(rows)
    Scorer([f"{__name__}:short_texts"]).check_rows(rows)


def short_texts(prompt, completion, answer):
    """Reward short completions, whatever the answer is."""
    return -float(len(completion))


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("no_colon", "'module:function' or 'file.py:function' is needed"),
        (":score", "'module:function' or 'file.py:function' is needed"),
        ("module:", "'module:function' or 'file.py:function' is needed"),
        ("no_such_module_anywhere:score", "cannot import 'no_such_module_anywhere'"),
        ("math:no_such_function", "'math' has no 'no_such_function'"),
        ("math:pi", "a float cannot be called"),
        (".relative:score", "must be an absolute module name"),
        ("no/such/file.py:score", "there is no file 'no/such/file.py' in"),
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


def test_a_module_that_ends_the_program_when_it_is_imported_is_named(user_module):
    name = user_module("import sys\n\ndef score(row, completion):\n    return 1.0\n\nsys.exit(4)\n")
    with pytest.raises(ValueError, match=rf"{name}:score.*importing '{name}' ends the program \(exit code 4\): put"):
        load_reward(f"{name}:score")


@pytest.mark.parametrize("form", ["def score(row, completion):", "async def score(row, completion):"])
def test_a_reward_that_ends_the_program_is_named(user_module, form):
    name = user_module(f"{form}\n    raise SystemExit(3)\n")
    with pytest.raises(ValueError, match=rf"{name}:score' ends the program \(exit code 3\): it must return a number"):
        Scorer([f"{name}:score"])(PROBLEMS, ANSWERS)


def test_a_file_is_imported_once_from_wherever_it_lies_with_what_lies_beside_it(tmp_path, monkeypatch):
    folder = tmp_path / "of-mine"  # no name that a module could have
    folder.mkdir()
    (folder / "beside_the_reward.py").write_text("bonus = 0.5\n")
    (folder / "my-reward.py").write_text(
        "import beside_the_reward\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
        "calls = []\ndef score(row, completion):\n    calls.append(1)\n"
        "    return len(calls) + beside_the_reward.bonus\n"
    )
    (folder / "broken.py").write_text("def score(:\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert load_reward("of-mine/my-reward.py:score")({}, "") == 1.5
    assert load_reward(f"{folder}/my-reward.py:score")({}, "") == 2.5
    with pytest.raises(ValueError, match=r"broken\.py:1: "):
        load_reward("of-mine/broken.py:score")
    with pytest.raises(ValueError, match="has no 'other'"):
        load_reward("of-mine/my-reward.py:other")
    for name in [name for name in sys.modules if name.startswith(str(folder)) or name == "beside_the_reward"]:
        del sys.modules[name]
