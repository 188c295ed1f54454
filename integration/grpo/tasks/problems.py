"""Problems, which are prompts with their answers, and the JSONL files that hold them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """A prompt and the answer that verifies its completion."""

    prompt: str  # the model's input
    answer: str  # the reward function compares the completion with it
    source: str = field(default="", compare=False)  # "file:line" to name in errors; empty for a generated problem


def load_problems(path: str | Path, prompt_field: str = "prompt", answer_field: str = "answer") -> list[Problem]:
    """Read one problem per line of a UTF-8 JSONL file, in file order.

    Each line is an object with both fields as strings; further fields are ignored. An answer may also be an integer,
    which is read as its decimal text. A prompt must not be blank. Lines of white space only are skipped.

    Raises ValueError naming the file, and for every wrong line (the first ten) its number and fault, at once; also for
    a file that cannot be read or holds no problem.
    """
    if prompt_field == answer_field:
        raise ValueError(f"prompt field and answer field are both {prompt_field!r}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{number}: not UTF-8 text") from error

    problems: list[Problem] = []
    faults: list[str] = []
    # Not splitlines(): it also splits at U+2028 and other characters, which JSON strings may contain.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            problems.append(_parse_problem(line, prompt_field, answer_field, source=f"{path}:{number}"))
        except ValueError as error:
            faults.append(f"{path}:{number}: {error}")
    if faults:
        more = f"; and {len(faults) - 10} more lines" if len(faults) > 10 else ""
        raise ValueError("; ".join(faults[:10]) + more)
    if not problems:
        raise ValueError(f"{path}: holds no problems (the file is empty)")
    return problems


def _parse_problem(line: str, prompt_field: str, answer_field: str, source: str) -> Problem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, not {_json_kind(record)}")
    faults = [f"field {field!r} is missing" for field in (prompt_field, answer_field) if field not in record]
    if prompt_field in record:
        prompt = record[prompt_field]
        if not isinstance(prompt, str):
            faults.append(f"field {prompt_field!r} must be a string, not {_json_kind(prompt)}")
        elif not prompt.strip():
            faults.append(f"field {prompt_field!r} is blank")
    if answer_field in record:
        answer = record[answer_field]
        if isinstance(answer, bool) or not isinstance(answer, (str, int)):
            faults.append(f"field {answer_field!r} must be a string or an integer, not {_json_kind(answer)}")
    if faults:
        raise ValueError(", ".join(faults))
    return Problem(prompt=record[prompt_field], answer=str(record[answer_field]), source=source)


def _json_kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def draw_problems(problems: Sequence[Problem], seed: int, step: int, num_problems: int) -> list[Problem]:
    """Draw the problems of one training step, a pure function of the arguments: a resumed run draws the same.

    Steps go through the whole list in a shuffled order, which changes with each pass. A problem is drawn once a pass;
    around the end of a pass it may come again soon.
    """
    if not problems:
        raise ValueError("there are no problems to draw from")
    if step < 0 or num_problems < 1:
        raise ValueError(f"step must be at least 0 and num_problems at least 1, not {step} and {num_problems}")
    drawn: list[Problem] = []
    epoch, offset = divmod(step * num_problems, len(problems))
    while len(drawn) < num_problems:
        order = list(range(len(problems)))
        random.Random(f"problems/{seed}/{epoch}").shuffle(order)
        drawn += [problems[i] for i in order[offset : offset + num_problems - len(drawn)]]
        epoch, offset = epoch + 1, 0
    return drawn
