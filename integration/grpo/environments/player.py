"""The episodes of a job: many at a time, on one engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from ....kernels.sampling.draws import derive_seed
from ....rollout.sampling_params import SamplingParams
from ...service import RolloutService
from ..rewards.score import RewardWeights, Score, checked_value, score_of
from ..rewards.user_calls import UserCalls, UserFunction
from ..settings.config import JobConfig
from ..tasks.picture_reader import PictureReader
from ..tasks.problems import Problem
from ..user_code import bound, imported, results_of
from .chat import EpisodeChat
from .episode import Episode
from .served import AgentServer
from .session import Session
from .turns import Asked, Turns

# Ready environments, which play those of other packages.
_ADAPTERS = "lockstep.integration.grpo.environments.adapters"
READY = {
    "agent": f"{_ADAPTERS}.agent:run",
    "reasoning_gym": f"{_ADAPTERS}.reasoning_gym:solve",
    "textarena": f"{_ADAPTERS}.textarena:play",
    "verifiers": f"{_ADAPTERS}.verifiers:rollout",
}
_REWARD = "reward"  # the name of an environment's reward, where that is a number

Environment = Callable[[dict[str, Any], Session], Awaitable[Episode]]
EpisodeKey = tuple[str, int, int]


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


def job_environment(config: JobConfig) -> Environment:
    """Return the environment of a job. Raises ValueError as `load_environment`, and where `rollout.ahead` would begin
    episodes of an environment that does not call itself repeatable."""
    found = load_environment(config.environment, config.environment_options)
    if config.rollout.ahead and not getattr(found, "is_repeatable", False):
        raise ValueError(
            f"rollout.ahead must be 0 with environment {config.environment!r}, or the function's attribute "
            "is_repeatable must be True, which says that an episode follows from its row and the model's tokens alone"
        )
    return found


@dataclass(frozen=True)
class Play:
    """Problems whose episodes are to be played, with the parameters of each problem's turns."""

    problems: Sequence[Problem]
    params: Sequence[SamplingParams]

    def episodes(self) -> Iterator[tuple[Problem, SamplingParams, int]]:
        """Yield the problem, the parameters and the number of each episode."""
        for problem, its in zip(self.problems, self.params, strict=True):
            for index in range(its.n):
                yield problem, its, index


class EpisodePlayer:
    """Plays the episodes of a job with its environment."""

    def __init__(
        self, config: JobConfig, service: RolloutService, tokenizer: PreTrainedTokenizerBase,
        calls: UserCalls | None = None,
    ) -> None:  # fmt: skip
        """Load the environment. calls: whose loop it plays in; None: one of this player's own. Raises ValueError as
        `load_environment`, and for one that cannot be played ahead where `rollout.ahead` asks for it."""
        self._location = config.environment
        self._user = UserFunction(f"environment {self._location!r}", "an episode", calls or UserCalls())
        self._environment = job_environment(config)
        self._weights = RewardWeights(config.reward_weights, (_REWARD,), f"those of {self._user.name}", may_vary=True)
        self._plays_ahead = config.rollout.ahead > 0
        self._service = service
        self._chat = EpisodeChat(config.data, tokenizer, PictureReader(config.model.path))
        self._playing: list[Turns] = []  # of the present play
        self._begun: dict[EpisodeKey, list[Asked]] = {}  # turns of episodes that were begun before their step

    def play(
        self, problems: Sequence[Problem], params: Sequence[SamplingParams], coming: Sequence[Play] = ()
    ) -> list[list[Episode]]:
        """Play episodes of each problem, all of them at a time. Returns those of each problem.

        params: of each problem's turns; `n` is the number of its episodes, and `sampling_seed` that of all, which
        differ by their number. coming: problems whose turn comes later, and their parameters. As episodes end, theirs
        are begun in the places, until all of the present ones are over; what they were is drawn again at their turn,
        so that this changes no token. An error of the environment ends the others; it gets a note with the row.
        """
        with self._service.rollout(release_kv=True), self._user.batch(sum(its.n for its in params)):
            return self._user.run(self._played(Play(problems, params), coming))

    def scores(self, problems: Sequence[Problem], played: Sequence[Sequence[Episode]]) -> list[list[Score]]:
        """Return the scores of the episodes of each problem. Raises ValueError, naming the row, for a reward that is no
        finite number and no dict of such, and for weights of a name that no reward has."""
        values = [
            [checked_value(episode.value, self._user.name, problem.source) for episode in episodes]
            for problem, episodes in zip(problems, played, strict=True)
        ]
        self._weights.check(chain.from_iterable(values))
        success_at = {_REWARD: getattr(self._environment, "success_at", None)}
        return [[score_of({_REWARD: value}, self._weights.by_name, success_at) for value in its] for its in values]

    async def _played(self, present: Play, coming: Sequence[Play]) -> list[list[Episode]]:
        places, agents = asyncio.Semaphore(0), AgentServer(self._service)
        beginning = [
            asyncio.create_task(self._begin(problem, its, index, places))
            for play in coming
            for problem, its, index in play.episodes()
        ]
        try:
            return await self._finished(present, places, agents)
        finally:
            for task in beginning:
                task.cancel()
            # Their errors are those of older weights: they come again at their turn, or do not.
            await asyncio.gather(*beginning, return_exceptions=True)
            await self._end_turns()
            await agents.close()

    async def _end_turns(self) -> None:
        """End the turns that an environment has left under way, in tasks of its own: the loop goes on after the play,
        and the engine must not."""
        left = [turns.task for turns in self._playing if turns.task is not None]
        for turns in self._playing:
            turns.is_over = True
        self._playing.clear()
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _finished(self, present: Play, places: asyncio.Semaphore, agents: AgentServer) -> list[list[Episode]]:
        played = iter(await results_of(self._episode(*episode, places, agents) for episode in present.episodes()))
        return [list(islice(played, its.n)) for its in present.params]

    async def _begin(self, problem: Problem, params: SamplingParams, index: int, places: asyncio.Semaphore) -> None:
        """Begin an episode of a coming step in a free place, and keep its turns."""
        async with places:
            turns = self._turns(problem, params, index)
            try:
                await self._environment(problem.whole_row(), self._session(turns, params, index))
            finally:
                if turns.asked:
                    self._begun[_key(problem, params, index)] = turns.asked

    def _turns(self, problem: Problem, params: SamplingParams, index: int) -> Turns:
        turns = Turns(self._service.engine, self._begun.pop(_key(problem, params, index), ()))
        self._playing.append(turns)
        return turns

    def _session(self, turns: Turns, params: SamplingParams, index: int, agents: AgentServer | None = None) -> Session:
        assert params.sampling_seed is not None
        seed, room = derive_seed(params.sampling_seed, index), self._service.engine.max_model_len
        agents = None if self._plays_ahead else agents  # what an agent does does not follow from tokens alone
        return Session(turns, self._chat, replace(params, n=1), seed, room, agents, self._user.waits)

    async def _episode(
        self, problem: Problem, params: SamplingParams, index: int, places: asyncio.Semaphore, agents: AgentServer
    ) -> Episode:
        session = self._session(self._turns(problem, params, index), params, index, agents)
        where = f"episode {index} of {problem.place}"
        episode = await self._user.awaited(
            lambda: self._environment(problem.whole_row(), session),
            lambda: f"{where}, turn {len(session.turns) + 1}",
        )
        if not isinstance(episode, Episode):
            raise ValueError(
                f"environment {self._location!r} returned a {type(episode).__name__} for {where}, not an Episode: "
                "`return session.episode(reward)`"
            )
        places.release()
        return episode


def _key(problem: Problem, params: SamplingParams, index: int) -> EpisodeKey:
    """Return what tells an episode from all others of a job: no two steps have a seed in common."""
    assert params.sampling_seed is not None
    return problem.source or problem.prompt, params.sampling_seed, index
