"""The evaluations of a run: on its held-out problems, and on the rows of the table `evaluations`."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence

from ...kernels.sampling.draws import derive_seed
from ...rollout.sampling_params import SamplingParams
from ..ranks import Ranks
from .engines.answers import Answer
from .results.samples import sample_row, shown
from .results.statistics import REWARD, num_successes, numbers_of, of_evaluation, pass_at_k
from .settings.config import JobConfig
from .tasks.problems import Problem
from .tasks.task import Task

_STREAM = -1  # of the seeds: no step has this number
_NUM_SHOWN = 2
Answering = Callable[[Sequence[Problem], Sequence[SamplingParams]], list[Answer]]


class Evaluation:
    """Answers of a job's engine to the problems of one evaluation, which the ranks share, and what they are given."""

    def __init__(
        self, config: JobConfig, ranks: Ranks, problems: Sequence[Problem], answer: Answering,
        count: Callable[[], int] | None = None, name: str = "",
    ) -> None:  # fmt: skip
        """Prepare the evaluation. answer: returns the scored answers to problems; see `Rollouts.answers`. count: see
        `Activity.of`. name: in the table `evaluations`; empty: the one on the held-out problems."""
        self._config, self._ranks, self._answer, self._count = config, ranks, answer, count
        self._problems, self._name = problems, name
        self._settings = config.evaluations[name] if name else config.eval
        self._every = (config.evaluations[name].every if name else 0) or config.run.eval_every
        # The seeds of a name stay when others come or go.
        self._stream = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")] if name else []
        self.examples: list[str] = []  # of the last evaluation: a few of this rank's answers, to be shown

    def is_due(self, step: int) -> bool:
        """Return whether weights are evaluated after so many steps."""
        return step % self._every == 0 or step == self._config.run.num_steps

    def run(self) -> dict[str, float]:
        """Evaluate the engine's weights. Returns, on the first rank, the mean reward, and where the reward names
        successes their share and pass@k; {} on the others. All ranks call it together."""
        settings, ranks = self._settings, self._ranks
        indices = range(ranks.rank, len(self._problems), ranks.num_ranks)
        mine = [self._problems[index] for index in indices]
        what = f"of {self._name} " if self._name else "held-out "
        doing = f"playing {what}episodes" if self._config.environment else f"scoring {what}answers"
        with ranks.activity.of(doing, self._count):  # but while the engine generates
            answers = self._answer(mine, [self._params(index) for index in indices])
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
        return {of_evaluation(metric, self._name): value for metric, value in found.items()}

    def _params(self, index: int) -> SamplingParams:
        """Return the parameters of a problem, which are the same each time, on any number of ranks."""
        seed = derive_seed(self._config.run.seed, _STREAM, index, *self._stream)
        return self._config.rollout.params(seed, n=self._settings.n, temperature=self._settings.temperature)


class Evaluations:
    """All evaluations of a run, by name: the held-out one has the empty name, and comes first."""

    def __init__(
        self, config: JobConfig, ranks: Ranks, task: Task, answer: Answering, count: Callable[[], int] | None = None
    ) -> None:
        """Prepare them; see `Evaluation`."""
        problems = {"": task.heldout, **task.evaluations}
        self._by_name = {name: Evaluation(config, ranks, its, answer, count, name) for name, its in problems.items()}
        self.examples: list[str] = []  # of the last call's held-out evaluation, if it had that, to be shown

    def due(self, step: int) -> list[str]:
        """Return the names of the evaluations after so many steps; of 0, all of them."""
        return [name for name, one in self._by_name.items() if one.is_due(step)]

    def run(self, names: Sequence[str]) -> dict[str, float]:
        """Run the evaluations of these names, one after the other. Returns, on the first rank, what each has found; {}
        on the others. All ranks call it together."""
        found: dict[str, float] = {}
        for name in names:
            found |= self._by_name[name].run()
        self.examples = self._by_name[""].examples if "" in names else []
        return found
