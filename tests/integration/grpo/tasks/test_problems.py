import pytest

from lockstep.integration.grpo.tasks import problems as problems_module
from lockstep.integration.grpo.tasks.problems import Problem, draw_problems, load_problems


def write(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_problems_come_in_file_order_with_blank_lines_skipped_and_further_fields_ignored(tmp_path):
    path = write(tmp_path, '{"q": "one?", "a": "1", "x": null}\n\n  \n{"q": "two?", "a": 2}')
    problems = load_problems(path, "q", "a")
    assert problems == [Problem("one?", "1"), Problem("two?", "2")]
    assert [problem.source for problem in problems] == [f"{path}:1", f"{path}:4"]


def test_characters_that_only_python_takes_for_line_ends_stay_inside_a_string(tmp_path):
    path = write(tmp_path, '{"prompt": "a\u2028b\x85", "answer": "c"}\n')
    assert load_problems(path) == [Problem("a\u2028b\x85", "c")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "p"', "not valid JSON"),
        ('["p", "a"]', "a JSON object is needed, not an array"),
        ("null", "a JSON object is needed, not null"),
        ('{"prompt": "p"}', "field 'answer' is missing"),
        ('{"prompt": 3, "answer": "a"}', "field 'prompt' must be a string or a list of messages, not a number"),
        ('{"prompt": " ", "answer": "a"}', "field 'prompt' is blank"),
        ('{"prompt": "p", "answer": true}', "field 'answer' must be a string or an integer, not a boolean"),
        ('{"prompt": "p", "answer": 1.5}', "field 'answer' must be a string or an integer, not a number"),
        ('{"prompt": "p", "answer": null}', "field 'answer' must be a string or an integer, not null"),
        ("[" * 100_000, "nested too deeply"),
        (r'{"prompt": "p \ud83d", "answer": "a"}', r"field 'prompt' has '\ud83d', half of a surrogate pair"),
        (
            r'{"prompt": [{"role": "user", "content": "\udc00"}], "answer": "a"}',
            r"field 'prompt' has '\udc00', half of a surrogate pair",
        ),
        (r'{"prompt": "p", "answer": "\ud83d"}', r"field 'answer' has '\ud83d', half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(tmp_path, line, reason):
    path = write(tmp_path, '{"prompt": "fine", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        load_problems(path)
    assert f"{path}:3: {reason}" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_offender_is_named_at_once(tmp_path):
    path = write(tmp_path, "{}\n" * 12)
    with pytest.raises(ValueError) as error:
        load_problems(path)
    message = str(error.value)
    assert message.startswith(f"{path}:1: field 'prompt' is missing, field 'answer' is missing; {path}:2: ")
    assert message.endswith('and 2 more lines; answer_field="" is for rows without answers')
    path = write(tmp_path, '{"answer": "a"}\n')
    with pytest.raises(ValueError, match=r"field 'prompt' is missing$"):
        load_problems(path)


def test_files_without_problems_are_named(tmp_path):
    path = write(tmp_path, "\n \n")
    with pytest.raises(ValueError, match=r"data.jsonl: holds no problems"):
        load_problems(path)
    with pytest.raises(ValueError, match=r"nowhere.jsonl: cannot be read: No such file"):
        load_problems(tmp_path / "nowhere.jsonl")
    path.write_bytes(b'{"prompt": "p", "answer": "a"}\n\xff\n')
    with pytest.raises(ValueError, match=r"data.jsonl:2: not UTF-8"):
        load_problems(path)


def test_names_with_dots_lead_into_nested_fields_unless_a_field_has_the_whole_name(tmp_path):
    path = write(tmp_path, '{"in": {"q": "one?"}, "a.b": 1, "a": {"b": 2}}\n{"in": {"q": "two?"}, "a": {"b": 2}}\n')
    assert load_problems(path, "in.q", "a.b") == [Problem("one?", "1"), Problem("two?", "2")]
    path = write(tmp_path, '{"in": "one?", "a": 3}\n')
    with pytest.raises(ValueError, match=r"data.jsonl:1: field 'in.q' is missing, field 'a.b' is missing"):
        load_problems(path, "in.q", "a.b")


def test_one_field_cannot_be_prompt_and_answer(tmp_path):
    with pytest.raises(ValueError, match="both 'text'"):
        load_problems(tmp_path / "any.jsonl", "text", "text")


def test_drawing_walks_through_every_problem_once_a_pass():
    problems = [Problem(str(i), "") for i in range(10)]
    drawn = [problem for step in range(10) for problem in draw_problems(problems, seed=3, step=step, num_problems=4)]
    for begin in range(0, 40, 10):
        assert sorted(p.prompt for p in drawn[begin : begin + 10]) == sorted(p.prompt for p in problems)
    assert drawn[:10] != drawn[10:20]


def test_drawing_is_a_function_of_seed_and_step():
    problems = [Problem(str(i), "") for i in range(50)]
    assert draw_problems(problems, 1, 7, 20) == draw_problems(problems, 1, 7, 20)
    assert draw_problems(problems, 1, 7, 20) != draw_problems(problems, 2, 7, 20)
    assert len(draw_problems(problems[:3], 0, 0, 8)) == 8


def test_drawing_from_nothing_or_with_impossible_counts_is_refused():
    with pytest.raises(ValueError, match="no problems"):
        draw_problems([], 0, 0, 1)
    with pytest.raises(ValueError, match="not -1 and 0"):
        draw_problems([Problem("p", "a")], 0, -1, 0)


def test_the_order_of_a_pass_is_shuffled_once_for_many_draws():
    count = 12_347  # of no other test
    numbered = [Problem(str(number), "") for number in range(count)]
    before = problems_module._shuffled.cache_info().misses
    drawn = [draw_problems(numbered, 5, step, 8) for step in (0, 1, 1, 2)]
    assert problems_module._shuffled.cache_info().misses == before + 1
    redrawn = [draw_problems(numbered, 5, 2, 8, attempt) for attempt in (1, 2)]
    assert problems_module._shuffled.cache_info().misses == before + 2
    assert drawn[1] == drawn[2] and len({one.prompt for its in (drawn[0], drawn[1], *redrawn) for one in its}) == 32
