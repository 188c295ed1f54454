"""The evaluation of a run on its held-out problems."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...kernels.sampling.draws import derive_seed
from ...rollout.completion import Completion
from ...rollout.sampling_params import SamplingParams
from ..ranks import Ranks
from .engines.engine import JobEngine
from .results.samples import sample_row, shown
from .results.statistics import REWARD, num_successes, numbers_of, pass_at_k
from .rewards.score import Score
from .settings.config import JobConfig
from .tasks.problems import Problem

_STREAM = -1  # of the seeds: no step has this number
_NUM_SHOWN = 2


class Evaluation:
    """Answers of a job's engine to the held-out problems, which the ranks share, and what they are given."""

    def __init__(
        self,
        config: JobConfig,
        ranks: Ranks,
        engine: JobEngine,
        problems: Sequence[Problem],
        score: Callable[[Sequence[Problem], Sequence[Completion]], list[Score]],
    ) -> None:
        """Prepare the evaluation. score: the job's reward of answers to problems."""
        self._config, self._ranks, self._engine, self._score = config, ranks, engine, score
        self._problems = problems
        self.examples: list[str] = []  # of the last evaluation: a few of this rank's answers, to be shown

    def run(self) -> dict[str, float]:
        """Evaluate the engine's weights. Returns, on the first rank, the mean reward, and where the reward names
        successes their share and pass@k; {} on the others. All ranks call it together."""
        settings, ranks = self._config.eval, self._ranks
        indices = range(ranks.rank, len(self._problems), ranks.num_ranks)
        params = [
            SamplingParams(
                n=settings.n,
                temperature=settings.temperature,
                max_new_tokens=self._config.rollout.max_new_tokens,
                sampling_seed=derive_seed(self._config.run.seed, _STREAM, index),
            )
            for index in indices
        ]
        mine = [self._problems[index] for index in indices]
        answers = self._engine.generate([problem.model_input for problem in mine], params)
        asked = [problem for problem in mine for _ in range(settings.n)]
        scores = self._score(asked, answers)
        triples = list(zip(asked, answers, scores, strict=True))[:: settings.n][:_NUM_SHOWN]
        self.examples = [shown(sample_row(*triple, 0.0)) for triple in triples]
        own = [numbers_of(*pair) for pair in zip(answers, scores, strict=True)]
        groups = ranks.in_turn([own[at : at + settings.n] for at in range(0, len(own), settings.n)])
        if not ranks.is_first:
            return {}
        found = {REWARD: statistics.fmean(one.reward for group in groups for one in group)}
        if (successes := num_successes(groups)) is not None:
            found["eval_success"] = sum(successes) / (len(groups) * settings.n)
            for k in (2**power for power in range(1, settings.n.bit_length())):
                found[f"eval_pass@{k}"] = statistics.fmean(pass_at_k(settings.n, num, k) for num in successes)
        return found
