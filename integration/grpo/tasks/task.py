"""The problems of a job: generated sums, the rows of files, or a dataset of the package reasoning-gym."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from ..settings.config import JobConfig
from .arithmetic import ArithmeticSpec, arithmetic_problems, keyed
from .chat import ChatPrompts
from .gym import gym_problems
from .picture_reader import PictureReader
from .pictures import picture_size
from .problems import Problem, draw_problems, load_problems
from .sources import Mixture, Source, divided_by_weight

Read = Callable[..., list[Problem]]  # takes the path of a file, and names of its fields that are not those of `data`
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
    all_known: Sequence[Problem]  # for checks before the start: all problems of files, or the longest generated sum
    num_dropped: int = 0  # further ones, which `data.too_long` has left out
    evaluations: Mapping[str, Sequence[Problem]] = field(default_factory=dict)  # of each further evaluation, by name


def build_task(config: JobConfig, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> Task:
    """Build the task of a config. tokenizer: of the model, whose chat template writes prompts that are messages;
    max_model_len: of its context. Raises ValueError naming the file and line, or the key, of each fault."""
    data = config.data
    chat = ChatPrompts(data, tokenizer, PictureReader(config.model.path))
    fitting = _Fitting(config, tokenizer, max_model_len)

    def read(path: str, prompt_field: str = "", answer_field: str = "") -> list[Problem]:
        fields = prompt_field or data.prompt_field, answer_field or data.answer_field, data.images_field
        return chat.written(load_problems(path, *fields))

    if not data.has_rows:
        task = _sums(config)
    elif data.sources:
        task = _of_sources(config, read, fitting)
    else:
        gym, where = data.reasoning_gym, data.path or data.reasoning_gym
        problems = chat.written(gym_problems(gym, data.reasoning_gym_options, config.run.seed)) if gym else read(where)
        task = _of_one(config, where, problems, read(data.heldout_path) if data.heldout_path else None, fitting)
    evaluations = {
        name: fitting(read(one.path, one.prompt_field, one.answer_field)[: one.num], f"evaluations.{name}", one.path)
        for name, one in config.evaluations.items()
    }
    all_known = [*task.all_known, *chain.from_iterable(evaluations.values())]
    return replace(task, all_known=all_known, num_dropped=fitting.num_dropped, evaluations=evaluations)


def sums_spec(config: JobConfig) -> ArithmeticSpec:
    """Return the range of generated sums. Raises ValueError, naming the settings."""
    data = config.data
    with keyed("data"):
        return ArithmeticSpec(config.run.seed, data.min_digits, data.max_digits, data.num_heldout)


def _sums(config: JobConfig) -> Task:
    """Return the task of generated sums."""
    sums, largest = arithmetic_problems(sums_spec(config)), "9" * config.data.max_digits
    longest = Problem(f"What is {largest} + {largest}?\n", str(2 * int(largest)))
    return Task(sums.train_problems, sums.heldout, (longest,))


def _of_one(
    config: JobConfig, where: str, problems: Sequence[Problem], heldout: Sequence[Problem] | None, fitting: _Fitting
) -> Task:
    """Return the task of these problems. where: that they are from; heldout: those of a file, if there is one. Raises
    ValueError where none can be held out."""
    train = problems
    if heldout is None:
        train, heldout = _divided(problems)
        _refuse_few(where, len(problems), heldout)
    # Held-out rows stay the same ones whatever is left out.
    train, heldout = fitting(train, "training", where), fitting(heldout, "held-out", where)
    draw = partial(_drawn, train, config.run.seed)
    return Task(draw, heldout[: config.data.num_heldout], [*train, *heldout])


def _of_sources(config: JobConfig, read: Read, fitting: _Fitting) -> Task:
    """Return the task of several sources. Each holds every tenth of its rows out, unless a file has those."""
    data, sources = config.data, dict[str, Source]()
    heldout: list[list[Problem]] = []
    for name, given in data.sources.items():
        rows = [replace(one, source_name=name) for one in read(given.path, given.prompt_field, given.answer_field)]
        train, out = (rows, []) if data.heldout_path else _divided(rows)
        sources[name] = Source(given.weight, fitting(train, "training", given.path))
        heldout.append(fitting(out, "held-out", given.path) if out else [])
    if data.heldout_path:
        heldout = [fitting(read(data.heldout_path), "held-out", data.heldout_path)]
        nums = [data.num_heldout]
    else:
        _refuse_few("data.sources", sum(len(one.problems) for one in sources.values()), [*chain(*heldout)])
        weights = [one.weight for one in sources.values()]
        nums = divided_by_weight(data.num_heldout, weights, list(map(len, heldout)))
    chosen = [one for its, num in zip(heldout, nums, strict=True) for one in its[:num]]
    train_rows = chain.from_iterable(one.problems for one in sources.values())
    return Task(Mixture(sources, config.run.seed), chosen, [*train_rows, *chain.from_iterable(heldout)])


def _drawn(train: Sequence[Problem], seed: int, step: int, num: int, attempt: int = 0) -> Sequence[Problem]:
    return draw_problems(train, seed, step, num, attempt)


def _divided(problems: Sequence[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Return the problems to train on, and every tenth, which is held out."""
    train = [problem for index, problem in enumerate(problems) if (index + 1) % _HELDOUT_ONE_IN]
    return train, list(problems[_HELDOUT_ONE_IN - 1 :: _HELDOUT_ONE_IN])


def _refuse_few(where: str, num: int, heldout: Sequence[Problem]) -> None:
    """Raise ValueError where no problem can be held out."""
    if not heldout:
        raise ValueError(
            f"{where}: {num} problems are too few to hold one in {_HELDOUT_ONE_IN} out: add some or set "
            "data.heldout_path"
        )


class _Fitting:
    """The rows whose prompts fit into the model's context: of a job with `data.too_long="refuse"` all, of which
    `check_lengths` refuses others."""

    def __init__(self, config: JobConfig, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        """Raise ValueError where the context has no room for prompts, and rows are to be left out."""
        self.num_dropped = 0  # rows that were left out so far
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        drops = config.data.too_long == "drop"
        self._room = _room(config.rollout.max_new_tokens, max_model_len) if drops else None

    def __call__(self, problems: Sequence[Problem], which: str, where: str) -> list[Problem]:
        """Return the rows that fit, and count the others. which, where: to be named where none is left, which raises
        ValueError."""
        room = self._room
        kept = [one for one in problems if room is None or _num_tokens(one, self._tokenizer) <= room]
        self.num_dropped += len(problems) - len(kept)
        if not kept:
            context = f"a context of {self._max_model_len} tokens"
            raise ValueError(f"{where}: all {which} prompts are too long for {context}")
        return kept


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
        (problem, f"{problem.place}: the prompt has {num_tokens} tokens")
        for problem in [*(one for one in problems if not one.pictures), *_largest(problems)]
        if (num_tokens := _num_tokens(problem, tokenizer)) > room
    ]
    if too_long:
        more = f"; and {len(too_long) - 3} more" if len(too_long) > 3 else ""
        are_rows = any(problem.source for problem, _ in too_long)  # not generated sums
        advice = '; data.too_long="drop" leaves such rows out' if are_rows else ""
        raise ValueError(
            f"{'; '.join(fault for _, fault in too_long[:3])}{more}; a context of {max_model_len} tokens with "
            f"rollout.max_new_tokens={max_new_tokens} takes prompts of {room}{advice}"
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
