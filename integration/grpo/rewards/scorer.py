"""The scoring of completions by one reward function or several, in whatever form each is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....rollout.completion import Completion
from ..settings.config import JobConfig
from ..tasks.problems import Problem
from ..user_code import results_of
from .loading import RewardFunction, load_reward
from .row_fields import row_check
from .score import RewardWeights, Score, Value, checked_value, described, score_of
from .scoring_process import ScoringProcess
from .user_calls import UserCalls, UserFunction

_AT_ONCE = 64  # calls of an async reward that are under way at a time
_SHOWN = 60  # characters of a completion in messages


@dataclass(frozen=True)
class SampleInfo:
    """Facts of a sample that a reward may want beside its text."""

    prompt: str  # as the model saw it, special tokens included
    token_ids: tuple[int, ...]
    finish_reason: str | None  # "stop", "length" or "abort"
    index: int  # number of the sample among those of its prompt


def make_scorer(config: JobConfig, calls: UserCalls | None = None) -> Scorer:
    """Load the rewards of a job. calls: see `Scorer`, which raises ValueError."""
    return Scorer(config.rewards, config.reward_weights, config.reward_options, calls)


class Scorer:
    """The rewards of a job, each with a name and a weight; the total is the weighted sum of all their components."""

    def __init__(
        self,
        locations: Sequence[str],
        weights: Mapping[str, float] | None = None,
        options: Mapping[str, Mapping[str, object]] | None = None,
        calls: UserCalls | None = None,
    ) -> None:
        """Load the reward functions; see `load_reward`.

        weights: of rewards and of components, by name; 1.0 where nothing is said. A reward's name is its function's.
        options: of rewards, by name. calls: whose loop async rewards run in; None: one of this scorer's own. Raises
        ValueError for a location that cannot be loaded, two rewards of one name, and options or weights of a reward
        that is not there.
        """
        calls = calls or UserCalls()
        self._rewards: dict[str, _Form] = {}
        left = dict(options or {})
        for location in locations:
            name = location.rpartition(":")[2].rpartition(".")[2]
            if name in self._rewards:
                raise ValueError(f"two rewards are called {name!r}: {location!r} and {self._rewards[name].location!r}")
            self._rewards[name] = _Form(location, load_reward(location, left.pop(name, None)), calls)
        if left:
            raise ValueError(f"reward_options are of {' and '.join(left)}, but the rewards are {self.names}")
        self._weights = RewardWeights(weights or {}, self._rewards, self.names)

    @property
    def names(self) -> str:
        """The names of the rewards, for messages."""
        return ", ".join(self._rewards)

    def __call__(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Score]:
        """Return the score of each completion. Raises ValueError naming the reward, and the row, for a value that is
        no finite number or no dict of such. The errors of the rewards come through, with a note of the sample."""
        if not completions:
            return []
        by_reward = {name: reward.values(problems, completions) for name, reward in self._rewards.items()}
        self._weights.check(value for values in by_reward.values() for value in values)
        success_at = {name: reward.success_at for name, reward in self._rewards.items()}
        return [
            score_of({name: values[at] for name, values in by_reward.items()}, self._weights.by_name, success_at)
            for at in range(len(completions))
        ]

    def check_rows(self, problems: Sequence[Problem]) -> None:
        """Raise ValueError naming the rows that lack what a ready reward reads of each, or have it wrong, the first
        three of them."""
        # A process of its own, which ends here: one that lives on would be shared with processes that are forked later.
        with closing(ScoringProcess()) as process:
            faults = [fault for reward in self._rewards.values() for fault in reward.faults_of(problems, process)]
        if faults:
            more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise ValueError("; ".join(faults[:3]) + more)


class _Form:
    """One reward function, called as its signature wants it."""

    def __init__(self, location: str, function: RewardFunction, calls: UserCalls) -> None:
        self.location, self._function = location, function
        self._user = UserFunction(f"reward {location!r}", "a number", calls)
        self.success_at: float | None = getattr(function, "success_at", None)
        called = function if inspect.isroutine(function) or hasattr(function, "func") else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(getattr(called, "func", called))
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        self._has_info = any(one.name == "info" for one in parameters)
        names = [
            name for name, one in zip(names, parameters, strict=False)
            # A third one with a default is the answer behind a prompt, and an option behind a row.
            if name != "info" and (one.default is one.empty or (len(names) == 3 and names[0] not in ("row", "rows")))
        ]  # fmt: skip
        has_many = any(one.kind is one.VAR_POSITIONAL for one in parameters)
        if len(names) not in (2, 3) and not has_many:
            raise ValueError(
                f"reward {location!r} takes {len(names)} arguments: it must take (row, completion), "
                "(rows, completions) or (prompt, completion, answer)"
            )
        self._has_texts = len(names) == 3 or has_many
        self._is_batched = bool(names) and names[0] == "rows"

    def faults_of(self, problems: Sequence[Problem], process: ScoringProcess) -> Iterator[str]:
        """Yield what rows lack, or have wrong, that a ready reward reads of each. process: see `row_check`."""
        check = row_check(self.location, getattr(self._function, "keywords", {}), process)
        if check is None:
            return
        for problem in problems:
            try:
                check(problem.fields, problem.answer)
            except ValueError as error:
                yield f"{problem.place}: {self._user.name}: {error}"

    def values(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Value]:
        """Return the checked value of each completion. An error of the function gets a note of the sample."""
        with self._user.batch(1 if self._is_batched else len(completions)):
            values = self._returned(problems, completions)
        return [
            checked_value(value, self._user.name, problem.source)
            for value, problem in zip(values, problems, strict=True)
        ]

    def _returned(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Sequence[Any]:
        if self._is_batched:
            return self._together(problems, completions)
        if self._is_async:
            return self._user.run(self._concurrently(problems, completions))
        return [self._called(*pair) for pair in zip(problems, completions, strict=True)]

    def _together(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Sequence[Any]:
        """Call a function of many completions with all of them."""
        pairs = list(zip(problems, completions, strict=True))
        info = {"info": [_info(*pair) for pair in pairs]} if self._has_info else {}
        rows, texts = [problem.whole_row() for problem in problems], [one.text for one in completions]
        call = partial(self._function, rows, texts, **info)
        what = partial(_many, *pairs[0], len(pairs))
        if self._is_async:
            values = self._user.run(self._user.awaited(call, what))
        else:
            with self._user.call(what):
                values = call()
        if not isinstance(values, Sequence) or len(values) != len(completions):
            raise ValueError(
                f"reward {self.location!r} must return {len(completions)} values, one for each completion, "
                f"not {described(values)}"
            )
        return values

    def _called(self, problem: Problem, completion: Completion) -> Any:
        with self._user.call(partial(_sample, problem, completion)):
            return self._call_of(problem, completion)()

    def _call_of(self, problem: Problem, completion: Completion) -> Callable[[], Any]:
        info = {"info": _info(problem, completion)} if self._has_info else {}
        if self._has_texts:
            return partial(self._function, problem.prompt, completion.text, problem.answer, **info)
        return partial(self._function, problem.whole_row(), completion.text, **info)

    async def _concurrently(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[Any]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(problem: Problem, completion: Completion) -> Any:
            async with limit:
                return await self._user.awaited(
                    self._call_of(problem, completion), partial(_sample, problem, completion)
                )

        return await results_of(one(*pair) for pair in zip(problems, completions, strict=True))


def _sample(problem: Problem, completion: Completion) -> str:
    """Name a sample, for messages."""
    return f"sample {completion.index} of {problem.place}, {completion.text!r:.{_SHOWN}}"


def _many(problem: Problem, completion: Completion, num: int) -> str:
    """Name many samples by the first of them."""
    return f"{num} completions, the first of them {_sample(problem, completion)}"


def _info(problem: Problem, completion: Completion) -> SampleInfo:
    reason = completion.finish_reason
    return SampleInfo(problem.prompt, completion.token_ids, None if reason is None else reason.type, completion.index)
