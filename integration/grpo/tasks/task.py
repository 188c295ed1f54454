"""The problems of a job: generated sums, the lines of a JSONL file, or a dataset of the package reasoning-gym."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from ..settings.config import JobConfig
from .arithmetic import ArithmeticSpec, arithmetic_problems
from .chat import ChatPrompts
from .gym import gym_problems
from .picture_reader import PictureReader
from .pictures import picture_size
from .problems import Problem, draw_problems, load_problems

_NUM_READ = 16  # prompts with pictures whose lengths are checked before the start
_HELDOUT_ONE_IN = 10  # of the problems of a file, where no file of held-out problems is given


class TrainProblems(Protocol):
    """The training problems of a step, as a pure function, so that runs can resume."""

    def __call__(self, step: int, num_problems: int, attempt: int = 0, /) -> Sequence[Problem]:
        """Return the problems of a step. attempt: above 0, others to take their places."""


@dataclass(frozen=True)
class Task:
    """The training problems of each step, and the held-out problems."""

    train_problems: TrainProblems
    heldout: Sequence[Problem]
    all_known: Sequence[Problem]  # for checks before the start: all problems of a file, or the longest generated sum
    num_dropped: int = 0  # further ones, which `data.too_long` has left out


def build_task(config: JobConfig, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> Task:
    """Build the task of a config. tokenizer: of the model, whose chat template writes prompts that are messages;
    max_model_len: of its context. Raises ValueError naming the file and line, or the key, of each fault."""
    data = config.data
    if not (data.path or data.reasoning_gym):
        spec = ArithmeticSpec(config.run.seed, data.min_digits, data.max_digits, data.num_heldout)
        sums = arithmetic_problems(spec)
        longest = Problem(f"What is {'9' * data.max_digits} + {'9' * data.max_digits}?\n", "")
        return Task(sums.train_problems, sums.heldout, (longest,))
    chat = ChatPrompts(data, tokenizer, PictureReader(config.model.path))
    fields = data.prompt_field, data.answer_field, data.images_field
    if data.reasoning_gym:
        loaded = gym_problems(data.reasoning_gym, data.reasoning_gym_options, config.run.seed)
    else:
        loaded = load_problems(data.path, *fields)
    problems = chat.written(loaded)
    if data.heldout_path:
        heldout = chat.written(load_problems(data.heldout_path, *fields))
        train = problems
    else:
        heldout = problems[_HELDOUT_ONE_IN - 1 :: _HELDOUT_ONE_IN]
        train = [problem for index, problem in enumerate(problems) if (index + 1) % _HELDOUT_ONE_IN]
        if not heldout:
            raise ValueError(
                f"{data.path or data.reasoning_gym}: {len(problems)} problems are too few to hold one in "
                f"{_HELDOUT_ONE_IN} out: add some or set data.heldout_path"
            )
    num = len(train) + len(heldout)
    if data.too_long == "drop":  # held-out rows stay the same ones whatever is left out
        room = _room(config.rollout.max_new_tokens, max_model_len)
        train, heldout = ([one for one in some if _num_tokens(one, tokenizer) <= room] for some in (train, heldout))
        for name, some in (("training", train), ("held-out", heldout)):
            if not some:
                where = data.path or data.reasoning_gym
                raise ValueError(f"{where}: all {name} prompts are too long for a context of {max_model_len} tokens")
    return Task(
        lambda step, num, attempt=0: draw_problems(train, config.run.seed, step, num, attempt),
        heldout[: data.num_heldout],
        [*train, *heldout],
        num - len(train) - len(heldout),
    )


def described_drops(task: Task, config: JobConfig) -> str:
    """Say how many rows `data.too_long` has left out."""
    num = len(task.all_known) + task.num_dropped
    return (
        f"{task.num_dropped} of {num} rows are left out: their prompts leave no room for rollout.max_new_tokens="
        f"{config.rollout.max_new_tokens} in the model's context"
    )


def _room(max_new_tokens: int, max_model_len: int) -> int:
    room = max_model_len - max_new_tokens
    if room < 1:
        raise ValueError(f"rollout.max_new_tokens of {max_new_tokens} leaves no prompt in a context of {max_model_len}")
    return room


def check_lengths(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, max_model_len: int
) -> None:
    """Raise ValueError, naming the first problems whose prompt leaves no room for an answer in the context. Of prompts
    with pictures those with the largest ones are read."""
    room = _room(max_new_tokens, max_model_len)
    too_long = [
        f"{problem.place}: the prompt has {num_tokens} tokens"
        for problem in [*(one for one in problems if not one.pictures), *_largest(problems)]
        if (num_tokens := _num_tokens(problem, tokenizer)) > room
    ]
    if too_long:
        more = f"; and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        raise ValueError(
            f"{'; '.join(too_long[:3])}{more}; a context of {max_model_len} tokens with rollout.max_new_tokens="
            f'{max_new_tokens} takes prompts of {room}; data.too_long="drop" leaves such rows out'
        )


def _largest(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems with the most pixels. Raises ValueError, naming the row, for what is no picture."""
    sizes: list[tuple[int, Problem]] = []
    for problem in problems:
        if problem.pictures:
            try:
                sizes.append((sum(map(picture_size, problem.pictures)), problem))
            except OSError as error:
                raise ValueError(f"{problem.source}: it has a picture that cannot be read: {error}") from error
    return [problem for _, problem in sorted(sizes, key=lambda pair: -pair[0])[:_NUM_READ]]


def _num_tokens(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> int:
    if problem.pictures:
        given = problem.model_input
        assert isinstance(given, dict)
        return int(given["input_ids"].shape[-1])
    ids = problem.prompt_ids
    return len(tokenizer(problem.prompt)["input_ids"] if ids is None else ids)
