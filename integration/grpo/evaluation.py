"""The evaluation of a run on its held-out problems."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...kernels.sampling.draws import derive_seed
from ...rollout.sampling_params import SamplingParams
from ..ranks import Ranks
from .engines.answers import Answer
from .results.samples import sample_row, shown
from .results.statistics import REWARD, num_successes, numbers_of, pass_at_k
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
        problems: Sequence[Problem],
        answer: Callable[[Sequence[Problem], Sequence[SamplingParams]], list[Answer]],
        count: Callable[[], int] | None = None,
    ) -> None:
        """Prepare the evaluation. answer: returns the scored answers to problems; see `Rollouts.answers`. count: see
        `Activity.of`."""
        self._config, self._ranks, self._answer, self._count = config, ranks, answer, count
        self._problems = problems
        self.examples: list[str] = []  # of the last evaluation: a few of this rank's answers, to be shown

    def run(self) -> dict[str, float]:
        """Evaluate the engine's weights. Returns, on the first rank, the mean reward, and where the reward names
        successes their share and pass@k; {} on the others. All ranks call it together."""
        settings, rollout, ranks = self._config.eval, self._config.rollout, self._ranks
        indices = range(ranks.rank, len(self._problems), ranks.num_ranks)
        params = [
            rollout.params(
                derive_seed(self._config.run.seed, _STREAM, index), n=settings.n, temperature=settings.temperature
            )
            for index in indices
        ]
        mine = [self._problems[index] for index in indices]
        doing = "playing held-out episodes" if self._config.environment else "scoring held-out answers"
        with ranks.activity.of(doing, self._count):  # but while the engine generates
            answers = self._answer(mine, params)
            ranks.meet()  # some may have had longer answers
        firsts = zip(mine, answers[:: settings.n], strict=True)
        self.examples = [
            shown(sample_row(problem, first.completion, first.score, 0.0))
            for problem, first in list(firsts)[:_NUM_SHOWN]
        ]
        own = [numbers_of(answer.completion, answer.score) for answer in answers]
        groups = ranks.in_turn([own[at : at + settings.n] for at in range(0, len(own), settings.n)])
        if not ranks.is_first:
            return {}
        found = {REWARD: statistics.fmean(one.reward for group in groups for one in group)}
        if (successes := num_successes(groups)) is not None:
            found["eval_success"] = sum(successes) / (len(groups) * settings.n)
            for k in (2**power for power in range(1, settings.n.bit_length())):
                found[f"eval_pass@{k}"] = statistics.fmean(pass_at_k(settings.n, num, k) for num in successes)
        return found
