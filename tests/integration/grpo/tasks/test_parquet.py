"""Tests of problems in Parquet files, as datasets of Hugging Face and verl have them."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lockstep.integration.grpo.planning import checks
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sections import DataSettings, RunSettings
from lockstep.integration.grpo.tasks import rows
from lockstep.integration.grpo.tasks.problems import Problem, load_problems


def write(tmp_path: Path, *given: dict, name: str = "rows.parquet") -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(given)), tmp_path / name, row_group_size=2)
    return tmp_path / name


def test_rows_of_verl_are_problems_and_keep_their_values(tmp_path):
    given = [
        {"data_source": "gsm8k", "prompt": [{"role": "user", "content": f"{number} + 1?"}], "ability": None,
         "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
         "extra_info": {"index": number, "day": date(2026, 1, 2), "weights": [0.5, 1.0]}}
        for number in range(5)
    ]  # fmt: skip
    path = write(tmp_path, *given)
    problems = load_problems(path, "prompt", "reward_model.ground_truth")
    assert [one.answer for one in problems] == ["1", "2", "3", "4", "5"]
    assert [one.messages for one in problems] == [one["prompt"] for one in given]
    assert [one.whole_row() for one in problems] == given
    assert [one.source for one in problems] == [f"{path}:{number}" for number in range(1, 6)]


def test_texts_and_whole_numbers_are_read_as_from_jsonl(tmp_path):
    path = write(tmp_path, {"q": "one?", "a": 1, "x": 0.5}, {"q": "two\u2028?", "a": 2, "x": None}, name="Rows.PARQUET")
    assert load_problems(path, "q", "a") == [Problem("one?", "1"), Problem("two\u2028?", "2")]
    assert load_problems(path, "q", "")[1].row == {"q": "two\u2028?", "a": 2, "x": None}


def test_fields_of_a_message_that_others_alone_have_are_not_there(tmp_path):
    call = {"function": {"name": "f", "arguments": None}}
    given = [
        {"prompt": [{"role": "user", "content": "q"}]},
        {"prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}]},
    ]  # fmt: skip
    plain, called = load_problems(write(tmp_path, *given), answer_field="")
    assert plain.messages == [{"role": "user", "content": "q"}]
    assert called.messages[0] == {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}


def test_pictures_of_a_list_column_are_found_beside_the_file(tmp_path):
    (tmp_path / "one.png").write_bytes(b"")
    path = write(tmp_path, {"prompt": "p", "images": ["one.png"]}, {"prompt": "q", "images": None})
    with_one, without = load_problems(path, answer_field="", images_field="images")
    assert with_one.pictures == (str(tmp_path / "one.png"),) and without.pictures == ()


def test_every_wrong_row_is_named_by_file_row_and_field(tmp_path):
    given = [{"prompt": "p", "meta": {"answer": 1.5}}, {"prompt": " ", "meta": {"answer": 2.0}},
             {"prompt": "p", "meta": None}]  # fmt: skip
    path = write(tmp_path, *given)
    with pytest.raises(ValueError) as error:
        load_problems(path, "prompt", "meta.answer")
    assert str(error.value) == (
        f"{path}:1: field 'meta.answer' must be a string or an integer, not a number; "
        f"{path}:2: field 'prompt' is blank, field 'meta.answer' must be a string or an integer, not a number; "
        f"{path}:3: field 'meta.answer' is missing; answer_field=\"\" is for rows without answers"
    )


def test_values_that_json_has_not_are_named_by_their_type(tmp_path):
    path = write(tmp_path, {"prompt": b"p", "answer": Decimal("1.5")}, {"prompt": b"q", "answer": None})
    with pytest.raises(ValueError) as error:
        load_problems(path)
    message = "field 'prompt' must be a string or a list of messages, not a value of type bytes"
    wrong = f"{message}, field 'answer' must be a string or an integer, not"
    assert str(error.value) == f"{path}:1: {wrong} a value of type Decimal; {path}:2: {wrong} null"


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.parquet: cannot be read: No such file"):
        load_problems(tmp_path / "nowhere.parquet")
    (tmp_path / "text.parquet").write_text('{"prompt": "p", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"text.parquet: cannot be read as Parquet, behind its first 0 rows: "):
        load_problems(tmp_path / "text.parquet")
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    parquet.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty.parquet: holds no problems"):
        load_problems(tmp_path / "empty.parquet")


def test_a_missing_package_is_named_with_the_keys_before_anything_is_loaded(tmp_path, monkeypatch):
    data = DataSettings(path=str(tmp_path / "a.parquet"), heldout_path="b.jsonl", few_shot_path="c.parquet")
    config = JobConfig(RunSettings("x", str(tmp_path)), data=data)
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None if name == "pyarrow" else object())
    monkeypatch.setattr(checks, "build_task", None)
    wanted = (
        r"data.path: '.*a.parquet' needs pyarrow, the extra `parquet`: pip install -e '.\[parquet\]'; "
        r"data.few_shot_path: 'c.parquet' needs pyarrow"
    )
    with pytest.raises(ValueError, match=wanted):
        checks.check_job(config, 1)
    with pytest.raises(ValueError, match="is in the folder of this very run"):
        checks.check_job(replace(config, run=RunSettings(tmp_path.name, str(tmp_path.parent))), 1)
