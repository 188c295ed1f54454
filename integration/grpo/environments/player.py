"""The episodes of a job: many at a time, on one engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ....kernels.sampling.draws import derive_seed
from ....rollout.completion import Completion
from ....rollout.sampling_params import SamplingParams
from ...service import RolloutService
from ..rewards.score import Score, checked_value, score_of
from ..settings.config import JobConfig
from ..tasks.problems import Problem
from ..user_code import bound, imported
from .chat import EpisodeChat
from .episode import Episode
from .session import Session

# Ready environments, which play those of other packages.
_ADAPTERS = "lockstep.integration.grpo.environments.adapters"
READY = {
    "reasoning_gym": f"{_ADAPTERS}.reasoning_gym:solve",
    "textarena": f"{_ADAPTERS}.textarena:play",
    "verifiers": f"{_ADAPTERS}.verifiers:rollout",
}

Environment = Callable[[dict[str, Any], Session], Awaitable[Episode]]


def load_environment(location: str, options: Mapping[str, object] | None = None) -> Environment:
    """Import the environment at "module:function" or "path/to/file.py:function", or the ready one of that name, and
    bind its options.

    Raises ValueError, in one line that names `location`, if it cannot be imported, is no coroutine function, or has no
    such option.
    """
    ready_ones = f", or the name of a ready one: {', '.join(READY)}"
    found = imported(READY.get(location, location), "environment", ready_ones)
    called = found if inspect.isroutine(found) else type(found).__call__
    if not inspect.iscoroutinefunction(called):
        raise ValueError(f"environment {location!r}: a coroutine function is needed: async def rollout(row, session)")
    return bound(found, "environment", location, options)


class EpisodePlayer:
    """Plays the episodes of a job with its environment."""

    def __init__(self, config: JobConfig, service: RolloutService, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the environment. Raises ValueError as `load_environment`."""
        self._location = config.environment
        self._environment = load_environment(config.environment, config.environment_options)
        self._weights = config.reward_weights
        self._service = service
        self._chat = EpisodeChat(config.data, tokenizer)

    def play(self, problems: Sequence[Problem], params: Sequence[SamplingParams]) -> list[list[Episode]]:
        """Play episodes of each problem, all of them at a time. Returns those of each problem.

        params: of each problem's turns; `n` is the number of its episodes, and `sampling_seed` that of all, which
        differ by their number. An error of the environment ends the others; it gets a note with the row.
        """
        with self._service.rollout(release_kv=True):
            return asyncio.run(self._played(problems, params))

    def score(self, problem: Problem, episode: Episode) -> Score:
        """Return the score of an episode. Raises ValueError, naming the row, for a reward that is no finite number and
        no dict of such."""
        value = checked_value(episode.value, f"environment {self._location!r}", problem.source)
        least: float | None = getattr(self._environment, "success_at", None)
        return score_of({"reward": value}, self._weights, {"reward": least})

    async def _played(self, problems: Sequence[Problem], params: Sequence[SamplingParams]) -> list[list[Episode]]:
        try:
            # The first error ends the others: nothing goes on in the background.
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(self._episode(problem, its, index)) for index in range(its.n)]
                    for problem, its in zip(problems, params, strict=True)
                ]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [[task.result() for task in its] for its in tasks]

    async def _episode(self, problem: Problem, params: SamplingParams, index: int) -> Episode:
        assert params.sampling_seed is not None
        engine = self._service.engine
        seed = derive_seed(params.sampling_seed, index)
        session = Session(self._generate, self._chat, replace(params, n=1), seed, engine.max_model_len)
        where = f"episode {index} of {problem.source or repr(problem.prompt)}"
        try:
            episode = await self._environment(problem.whole_row(), session)
        except Exception as error:
            error.add_note(f"in environment {self._location!r}, {where}, turn {len(session.turns) + 1}")
            raise
        if not isinstance(episode, Episode):
            raise ValueError(
                f"environment {self._location!r} returned a {type(episode).__name__} for {where}, not an Episode: "
                "`return session.episode(reward)`"
            )
        return episode

    async def _generate(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        [completion] = await self._service.engine.agenerate([prompt_ids], params)
        if not completion.token_ids:
            reason = completion.finish_reason
            raise RuntimeError(f"a turn ended before its first token: {None if reason is None else reason.message}")
        return completion
