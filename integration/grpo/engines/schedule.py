"""The schedule of a run whose samples depend on timing: under which commit each token was drawn. Its file repeats it.

A line of `schedule.jsonl` is a step: {"step": 3, "spans": [prompt][sample][[version, number of tokens], ...]}, prompts
in the order of the step, whatever rank they were on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ....rollout.ahead.group import Spans
from ....rollout.completion import Completion
from ...failures import files_of
from ...ranks import Ranks

SCHEDULE = "schedule.jsonl"
StepSpans = list[list[Spans]]  # of each prompt and sample


def step_spans(completions: list[Completion], group_size: int, ranks: Ranks) -> StepSpans:
    """Return the spans of a step's samples, those of all ranks on the first. All ranks call it together."""
    spans: list[Spans] = [
        [(span.version, span.end - span.start) for span in one.weight_versions] for one in completions
    ]
    return ranks.in_turn([spans[at : at + group_size] for at in range(0, len(spans), group_size)])


def append_step(path: Path, step: int, spans: StepSpans) -> None:
    """Append a step, counted from 1, to the file. Raises FileFailed."""
    with files_of(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "spans": spans}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_schedule(path: str) -> dict[int, StepSpans]:
    """Read the spans of each step, counted from 1. Raises ValueError naming the file."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return {
            line["step"]: [[[(str(v), int(n)) for v, n in spans] for spans in prompt] for prompt in line["spans"]]
            for line in lines
        }
    except OSError as error:
        raise ValueError(f"run.replay_schedule: {path!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"run.replay_schedule: {path!r} is no schedule of a run: {error}") from error


def refuse_older_versions(path: str, schedule: Mapping[int, StepSpans], num_done: int) -> None:
    """Raise ValueError where a run that goes on after `num_done` steps has to draw tokens of weights before these."""
    for step in sorted(step for step in schedule if step > num_done):
        versions = {version for prompt in schedule[step] for spans in prompt for version, _ in spans}
        if older := [version for version in versions if version.isdecimal() and int(version) < num_done]:
            raise ValueError(
                f"run.replay_schedule: step {step} of {path!r} has tokens of the weights after step "
                f"{min(older, key=int)}, and --resume goes on with those after step {num_done}: a replay of "
                "them begins anew, without --resume"
            )
