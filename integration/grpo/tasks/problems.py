"""Problems, which are prompts with their answers, as the rows of files hold them."""

from __future__ import annotations

import copy
import functools
import json
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .pictures import pictures_of, placed
from .rows import Row, field_of, has_field, is_parquet, read_rows, without_nulls

ReadPictures = Callable[[str, Sequence[str]], dict[str, Any]]  # takes a text with their places; returns tensors
_KEPT_ORDERS = 16  # random orders that are kept: one of each source, and those of redraws; 4 bytes a problem
Message = Mapping[str, Any]  # of a conversation: role and content, and what else its chat template reads


@dataclass(frozen=True)
class Problem:
    """A prompt and the answer that verifies its completion."""

    prompt: str  # the model's input; of messages, the text that the chat template makes of them
    answer: str  # the reward function compares the completion with it
    source: str = field(default="", compare=False)  # "file:line" to name in errors; empty for a generated problem
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # all fields of its row, for the reward
    messages: Sequence[Message] = field(default=(), compare=False)  # where the prompt is a conversation
    prompt_ids: tuple[int, ...] | None = field(default=None, compare=False)  # of messages: tokens of the prompt
    pictures: tuple[str, ...] = field(default=(), compare=False)  # files of the prompt's pictures, in their order
    read: ReadPictures | None = field(default=None, compare=False)  # of a prompt with pictures
    source_name: str = field(default="", compare=False)  # in the table `data.sources`, where there are several

    @property
    def place(self) -> str:
        """The name of the problem in errors: its file and line, or its prompt."""
        return self.source or repr(self.prompt)

    @property
    def model_input(self) -> str | list[int] | dict[str, Any]:
        """The prompt for an engine. Pictures are read anew each time. Raises ValueError, naming the row, for one that
        cannot be."""
        if self.pictures:
            assert self.read is not None
            try:
                return self.read(self.prompt, self.pictures)
            except ValueError as error:
                raise ValueError(f"{self.place}: {error}") from error
        return self.prompt if self.prompt_ids is None else list(self.prompt_ids)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields for a reward; of a generated problem prompt and answer. They are not to be changed."""
        return self.row or {"prompt": self.prompt, "answer": self.answer}

    def whole_row(self) -> dict[str, Any]:
        """Return a copy of the fields. Users' functions may change it, nested values too: others' rows stay."""
        return copy.deepcopy(dict(self.fields))


def load_problems(
    path: str | Path, prompt_field: str = "prompt", answer_field: str = "answer", images_field: str = ""
) -> list[Problem]:
    """Read one problem per row of a file, in file order: a line of UTF-8 JSONL, or a row of Parquet.

    Each row is an object with a prompt, text or a list of messages, which must not be blank; further fields are for
    the reward. The answer is text or an integer, which is read as its decimal text; with an empty `answer_field` rows
    have none. A name with dots is that of a nested field, unless a field has the whole name. Pictures are the files
    that the field `images_field` lists, or that messages name in parts of the type "image" (`image` or `path`),
    relative to the folder of the file.

    Raises ValueError naming the file, and for every wrong row (the first ten) its number and fault, at once; also for
    a file that cannot be read or holds no problem.
    """
    if prompt_field == answer_field:
        raise ValueError(f"prompt field and answer field are both {prompt_field!r}")
    problems: list[Problem] = []
    faults: list[str] = []
    for row in read_rows(path):
        try:
            problem = _problem_of(row, prompt_field, answer_field, has_nulls=is_parquet(path))
            problems.append(_with_pictures(problem, images_field, Path(path).parent))
        except ValueError as error:
            faults.append(f"{row.place}: {error}")
    if faults:
        more = f"; and {len(faults) - 10} more {'rows' if is_parquet(path) else 'lines'}" if len(faults) > 10 else ""
        has_none = answer_field and any(_missing(answer_field) in fault for fault in faults)
        raise ValueError(
            "; ".join(faults[:10]) + more + '; answer_field="" is for rows without answers' * bool(has_none)
        )
    if not problems:
        raise ValueError(f"{path}: holds no problems (the file is empty)")
    return problems


def _missing(field: str) -> str:
    return f"field {field!r} is missing"


def _problem_of(row: Row, prompt_field: str, answer_field: str, *, has_nulls: bool) -> Problem:
    """Return the problem of a row. has_nulls: fields of its messages that are null are none. Raises ValueError."""
    record = row.read()
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, not {_json_kind(record)}")
    faults = [_missing(field) for field in (prompt_field, answer_field) if field and not has_field(record, field)]
    prompt = field_of(record, prompt_field, " ")
    answer = field_of(record, answer_field, "") if answer_field else ""
    if isinstance(prompt, list):
        prompt = without_nulls(prompt) if has_nulls else prompt
        faults += [f"field {prompt_field!r}: {why}" for why in _wrong_messages(prompt)]
    elif not isinstance(prompt, str):
        faults.append(f"field {prompt_field!r} must be a string or a list of messages, not {_json_kind(prompt)}")
    elif has_field(record, prompt_field) and not prompt.strip():
        faults.append(f"field {prompt_field!r} is blank")
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        faults.append(f"field {answer_field!r} must be a string or an integer, not {_json_kind(answer)}")
    for name, value in ((prompt_field, prompt), (answer_field, answer)):
        if half := _half_pair(json.dumps(value, ensure_ascii=False, default=str)):
            faults.append(f"field {name!r} has {half!r}, half of a surrogate pair, which is no character")
    if faults:
        raise ValueError(", ".join(faults))
    messages = prompt if isinstance(prompt, list) else ()
    return Problem("" if messages else prompt, str(answer), row.place, record, messages)


def _half_pair(text: str) -> str:
    """Return the first half of a surrogate pair in a text, which only an escape of JSON can write; empty: none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


def _with_pictures(problem: Problem, images_field: str, folder: Path) -> Problem:
    """Return a problem with its pictures, if it has some. Raises ValueError for files that are not there, and for
    numbers of pictures that do not fit."""
    given = field_of(problem.row, images_field, []) if images_field else []
    given = [] if given is None else given
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"field {images_field!r} must be a path or a list of paths, not {_json_kind(given)}")
    named = pictures_of(problem.messages)
    if images_field and given and None not in named and named:
        raise ValueError(f"field {images_field!r} has pictures, and the messages name their own")
    files = [str(folder / str(one)) for one in (given or named) if one is not None]
    if absent := [file for file in files if not Path(file).is_file()]:
        raise ValueError(f"there is no picture {absent[0]}")
    if not files and not named:
        return problem
    messages = placed(problem.messages, files) if problem.messages else ()
    return replace(problem, messages=messages, pictures=tuple(files))


def _wrong_messages(messages: list[object]) -> list[str]:
    """List what is wrong with messages: each is an object with a role and a content, and the last one is not the
    assistant's."""
    if not messages:
        return ["holds no message"]
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            found.append(f"message {number} must be an object with role and content, not {_json_kind(message)}")
    if not found and isinstance(messages[-1], dict) and messages[-1]["role"] == "assistant":
        found.append("the last message is the assistant's, whose turn it is")
    return found


def _json_kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return "null" if value is None else names.get(type(value), f"a value of type {type(value).__name__}")


def draw_problems(
    problems: Sequence[Problem], seed: int, step: int, num_problems: int, attempt: int = 0
) -> list[Problem]:
    """Draw the problems of one training step, a pure function of the arguments: a resumed run draws the same.

    Steps go through the whole list in a shuffled order, which changes with each pass. A problem is drawn once a pass;
    around the end of a pass it may come again soon. attempt: above 0, draw others in the place of these, different ones
    for each attempt as far as the list reaches.
    """
    if step < 0 or num_problems < 1:
        raise ValueError(f"step must be at least 0 and num_problems at least 1, not {step} and {num_problems}")
    return draw_from(problems, str(seed), step, step * num_problems, num_problems, attempt)


def draw_from(
    problems: Sequence[Problem], stream: str, step: int, num_before: int, num_problems: int, attempt: int = 0
) -> list[Problem]:
    """Draw the problems of one step, of which `num_before` were drawn in the steps before; see `draw_problems`. stream:
    of the random order."""
    if not problems:
        raise ValueError("there are no problems to draw from")
    drawn: list[int] = []
    epoch, offset = divmod(num_before, len(problems))
    while len(drawn) < num_problems:
        drawn += _shuffled(len(problems), f"problems/{stream}/{epoch}")[offset : offset + num_problems - len(drawn)]
        epoch, offset = epoch + 1, 0
    if attempt:
        order, taken = _shuffled(len(problems), f"redraw/{stream}/{step}"), set(drawn)
        others = [index for index in order if index not in taken] or order
        first = (attempt - 1) * num_problems
        drawn = [others[(first + at) % len(others)] for at in range(num_problems)]
    return [problems[index] for index in drawn]


@functools.lru_cache(_KEPT_ORDERS)
def _shuffled(count: int, stream: str) -> Sequence[int]:
    """Return the numbers below `count` in the random order of a stream: a second for a million, so that it is kept."""
    order = list(range(count))
    random.Random(stream).shuffle(order)
    return array("I", order)
