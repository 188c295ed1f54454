"""The samples of a step on one rank: prompts to the engine, answers to the trainer, group by group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

import torch

from ....kernels.sampling.draws import derive_seed
from ....rollout.ahead.rollouts import AheadCounts
from ....rollout.completion import Completion
from ....rollout.media.images import Images
from ....rollout.sampling_params import SamplingParams
from ...failures import RESUME, EngineFailed
from ...ranks import Ranks
from ..environments.player import EpisodePlayer, Play
from ..results.samples import packed, sample_row
from ..results.statistics import LengthPenalty, SampleNumbers, compared_reward, is_flat, is_truncated, numbers_of
from ..rewards.scorer import Scorer
from ..settings.config import JobConfig
from ..tasks.problems import Problem
from ..tasks.task import Task
from ..training.advantages import StepRewards, group_advantages
from ..training.packing import Sample
from .answers import Answer, StepSamples, lag_of, waited
from .engine import JobEngine, StepPrompts
from .schedule import SCHEDULE, append_step, read_schedule, step_spans

T = TypeVar("T")


class Rollouts:
    """Samplings of the steps of a job, of which coming ones may be begun before their turn."""

    def __init__(
        self, config: JobConfig, ranks: Ranks, engine: JobEngine, task: Task, reward: Scorer,
        player: EpisodePlayer | None = None, *, banned: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Begin nothing. player: of a job with an environment; banned: the `logit_bias` of tokens that are never
        drawn."""
        self._config, self._ranks, self._engine, self._task, self._reward = config, ranks, engine, task, reward
        self._player = player
        self._banned = banned or {}
        self._penalty = LengthPenalty(
            config.train.truncated_penalty, config.train.overlong_tokens, config.rollout.max_new_tokens
        )
        self._num_begun = 0  # steps whose prompts the engine has
        self._counts = AheadCounts()  # at the end of the step before
        path = config.run.replay_schedule
        self._replayed = read_schedule(path) if path else None

    def samples(self, step: int, into: StepSamples) -> Iterator[Sample]:
        """Yield this rank's samples of a step in order, waiting for each group; note their answers in `into`.

        The steps that may be begun by now are begun. With `rollout.redraw`, and where advantages depend on the whole
        step, all groups are waited for before the first sample is yielded, and all ranks come here together.
        """
        problems, train = self._problems(step), self._config.train
        answered = self._played(step, problems, into) if self._player else self._generated(step, problems, into)
        if self._config.rollout.redraw:
            problems, answered = self._with_spread(step, problems, list(answered), into)
        if self._config.rollout.shuffle_rewards:
            answered = self._shuffled(step, list(answered))
        of_step = None
        if train.needs_whole_step:
            of_step = StepRewards.of(self._of_step(known := list(answered)))
            answered = iter(known)
        for group, (problem, answers) in enumerate(zip(problems, answered, strict=True)):
            totals = torch.tensor([self._totals(answers)])
            advantages = group_advantages(totals, train.baseline, train.scale_rewards, of_step)[0].tolist()
            into.answers += answers
            into.problems += [problem] * len(answers)
            into.advantages += advantages
            for answer, advantage in zip(answers, advantages, strict=True):
                counts = train.truncated == "count" or not is_truncated(answer.completion)
                yield from answer.samples(step, advantage, counts=counts, group=group)

    def _of_step(self, answered: Sequence[Sequence[Answer]]) -> list[float]:
        """Return the compared rewards of all ranks' groups, in the same order on any number of ranks."""
        self._ranks.meet()  # some may still draw, or score
        each = self._ranks.of_all([self._totals(answers) for answers in answered])
        return list(chain.from_iterable(chain.from_iterable(zip(*each, strict=True))))

    def _generated(self, step: int, problems: Sequence[Problem], into: StepSamples) -> Iterator[list[Answer]]:
        """Yield the answers to each problem of a step as they come. Coming steps are begun as far as they may be."""
        rollout, num_steps = self._config.rollout, self._config.run.num_steps
        for coming in range(max(step, self._num_begun), min(step + rollout.steps_begun_ahead, num_steps - 1) + 1):
            self._begin(coming)
        left = iter(problems)
        for groups in waited(self._engine.groups(step, len(problems)), into):
            its = [problem for group, problem in zip(groups, left, strict=False) for _ in group]
            # Those that are there are scored in one call: a reward of many completions, or an async one, has them all.
            answers = iter(self._scored(its, [one for group in groups for one in group], into))
            yield from (list(islice(answers, len(group))) for group in groups)

    def _played(self, step: int, problems: Sequence[Problem], into: StepSamples) -> Iterator[list[Answer]]:
        """Yield the episodes of each problem of a step, once all of them are over."""
        coming, rollout = [], self._config.rollout
        for later in range(step + 1, min(step + rollout.ahead, self._config.run.num_steps - 1) + 1):
            its_problems = self._problems(later)
            coming.append(Play(its_problems, self._params(later, len(its_problems))))
        answers = self.answers(problems, self._params(step, len(problems)), coming, into)
        size = rollout.group_size
        yield from (answers[at : at + size] for at in range(0, len(answers), size))

    def _totals(self, answers: Sequence[Answer]) -> list[float]:
        """Return the rewards of a group as its advantages compare them."""
        return [compared_reward(one.completion, one.score, self._penalty) for one in answers]

    def _with_spread(
        self, step: int, problems: Sequence[Problem], answered: list[list[Answer]], into: StepSamples
    ) -> tuple[list[Problem], Iterator[list[Answer]]]:
        """Replace groups that teach nothing (`is_flat`) by groups of other problems, drawn from the same weights, up to
        `rollout.redraw` times. Problems and seeds follow from (run.seed, step, index, attempt)."""
        problems, rollout, ranks = list(problems), self._config.rollout, self._ranks
        for attempt in range(1, rollout.redraw + 1):
            flat = [at for at, answers in enumerate(answered) if is_flat(self._totals(answers))]
            ranks.meet()  # some may still draw
            if not ranks.total(len(flat)):  # of all ranks: those of a replica generate together
                break
            others, params = self._problems(step, attempt), self._params(step, len(problems), attempt)
            if flat or self._config.parallel.num_ranks > 1:
                new = self.answers([others[at] for at in flat], [params[at] for at in flat], into=into)
            for place, at in enumerate(flat):
                into.num_discarded_tokens += sum(one.completion.num_completion_tokens for one in answered[at])
                problems[at] = others[at]
                answered[at] = new[place * rollout.group_size : (place + 1) * rollout.group_size]
            into.num_redrawn += len(flat)
        into.num_flat = sum(is_flat(self._totals(answers)) for answers in answered)
        return problems, iter(answered)

    def redrawn(self, samples: StepSamples) -> dict[str, object]:
        """Return how many groups of a step were drawn in the place of others, and how many stayed without spread, over
        all ranks; {} without `rollout.redraw`. All ranks call it together."""
        if not self._config.rollout.redraw:
            return {}
        total = self._ranks.total
        return {"redrawn_groups": int(total(samples.num_redrawn)), "stayed_flat": int(total(samples.num_flat))}

    def answers(
        self, problems: Sequence[Problem], params: Sequence[SamplingParams], coming: Sequence[Play] = (),
        into: StepSamples | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Return the answers of the present weights, the `n` of a problem's parameters side by side. coming: see
        `EpisodePlayer.play`; into: notes the seconds."""
        player, params = self._player, [self._with_bans(its) for its in params]
        into, began = into or StepSamples(), time.perf_counter()
        if player is None:
            completions = self._engine.generate([problem.model_input for problem in problems], params)
            into.waited_s += time.perf_counter() - began
            each = [problem for problem, its in zip(problems, params, strict=True) for _ in range(its.n)]
            return self._scored(each, completions, into)
        played = player.play(problems, params, coming)
        into.waited_s += time.perf_counter() - began
        return [
            Answer(episode.as_completion(index), score, episode)
            for episodes, scores in zip(played, player.scores(problems, played), strict=True)
            for index, (episode, score) in enumerate(zip(episodes, scores, strict=True))
        ]

    def end(self, step: int, samples: StepSamples) -> None:
        """Log what the samples of a step depend on beyond the settings, and wait for what a schedule still wants of
        these weights. All ranks call it together, before the weights change."""
        if self._config.depends_on_timing:
            spans = step_spans(samples.completions, self._config.rollout.group_size, self._ranks)
            if self._ranks.is_first:
                append_step(self._config.folder / SCHEDULE, step + 1, spans)
        if self._replayed is not None:
            self._engine.settle()
            self._ranks.total(0)  # the first rank pushes to the engines of all ranks: it waits until each has settled

    def numbers(self, samples: StepSamples) -> list[SampleNumbers]:
        """Return the numbers of a step's samples, those of all ranks on the first. All ranks call it together."""
        own = [
            numbers_of(one.completion, one.score, self._penalty, problem.source_name)
            for one, problem in zip(samples.answers, samples.problems, strict=True)
        ]
        return self._of_all_ranks(own)

    def rows(self, samples: StepSamples) -> list[dict[str, object]]:
        """Return this rank's samples of a step as they are kept."""
        answered = zip(samples.problems, samples.answers, samples.advantages, strict=True)
        temperature = self._config.rollout.temperature
        return [
            sample_row(problem, answer.completion, answer.score, advantage, answer.episode, answer.images, temperature)
            for problem, answer, advantage in answered
        ]

    def packed(self, samples: StepSamples) -> list[bytes]:
        """Return the samples of a step, group by group, as they are written, those of all ranks on the first. All ranks
        call it together."""
        rows, size = self.rows(samples), self._config.rollout.group_size
        return self._ranks.in_turn([packed(rows[at : at + size]) for at in range(0, len(rows), size)])

    def images(self, samples: StepSamples) -> dict[str, Images]:
        """Return the images of a step's samples by their SHA-256, those of all ranks on the first, likewise."""
        own = {images.digest: images for answer in samples.answers for images in answer.images}
        return {digest: images for its in self._ranks.in_turn([own]) for digest, images in its.items()}

    def _of_all_ranks(self, own: list[T]) -> list[T]:
        size = self._config.rollout.group_size
        groups = self._ranks.in_turn([own[at : at + size] for at in range(0, len(own), size)])
        return [one for group in groups for one in group]

    def lag(self, step: int, samples: StepSamples) -> dict[str, object]:
        """Return how many commits ago the step's tokens were drawn, over all ranks."""
        spans = [(lag_of(s, step), s.end - s.start) for c in samples.completions for s in c.weight_versions]
        num_tokens = self._ranks.total(sum(num for _, num in spans))
        return {
            "lag_mean": self._ranks.total(sum(lag * num for lag, num in spans)) / num_tokens,
            "lag_max": int(self._ranks.largest(max(lag for lag, _ in spans))),
        }

    def ahead(self, waited_s: float) -> dict[str, object]:
        """Return what was verified and dropped since the last call, and where the engine's time went, over all
        ranks."""
        counts, total, largest = self._engine.counts(), self._ranks.total, self._ranks.largest
        new, self._counts = counts - self._counts, counts
        num_kept, num_parted = int(total(new.num_kept_tokens)), int(total(new.num_parted_tokens))
        return {
            "verified_tokens": int(total(new.num_verified_tokens)),
            "redrawn_tokens": num_parted,
            "dropped_tokens": int(total(new.num_dropped_tokens)),
            "kept_share": num_kept / (num_kept + num_parted) if num_kept + num_parted else None,
            "generate_s": largest(new.step_seconds - new.verify_seconds),
            "verify_s": largest(new.verify_seconds),
            "wait_s": waited_s if self._engine.service is None else 0.0,  # for an engine in a process of its own
        }

    def _begin(self, step: int) -> None:
        """Queue this rank's prompts of a step."""
        ranks, problems = self._ranks, self._problems(step)
        params = self._params(step, len(problems))
        schedule = None
        if self._replayed is not None:
            spans = self._replayed.get(step + 1)
            if spans is None or len(spans) != self._config.rollout.prompts_per_step:
                path, num = self._config.run.replay_schedule, self._config.rollout.prompts_per_step
                raise ValueError(f"run.replay_schedule: {path!r} has no step {step + 1} of {num} prompts")
            schedule = spans[ranks.rank :: ranks.num_ranks]
        self._engine.begin(step, StepPrompts([problem.model_input for problem in problems], params, schedule))
        self._num_begun = step + 1

    def _problems(self, step: int, attempt: int = 0) -> list[Problem]:
        """Return this rank's problems of a step; of an attempt above 0, those that may take their places."""
        num = self._config.rollout.prompts_per_step
        problems = self._task.train_problems(step, num, attempt) if attempt else self._task.train_problems(step, num)
        return list(problems)[self._ranks.rank :: self._ranks.num_ranks]

    def _params(self, step: int, num_problems: int, attempt: int = 0) -> list[SamplingParams]:
        """Return the settings of this rank's problems of a step, likewise."""
        more = (attempt,) if attempt else ()
        ranks, seed = self._ranks, self._config.run.seed
        indices = [ranks.rank + number * ranks.num_ranks for number in range(num_problems)]
        # The same on any number of ranks.
        return [
            self._with_bans(self._config.rollout.params(derive_seed(seed, step, index, *more))) for index in indices
        ]

    def _with_bans(self, params: SamplingParams) -> SamplingParams:
        """Return settings with which the banned tokens are never drawn."""
        return replace(params, logit_bias={**(params.logit_bias or {}), **self._banned}) if self._banned else params

    def _scored(
        self, problems: Sequence[Problem], completions: Sequence[Completion], into: StepSamples
    ) -> list[Answer]:
        for pair in zip(problems, completions, strict=True):
            _refuse_unfinished(*pair)
        began = time.perf_counter()
        scores = self._reward(problems, completions)
        into.scored_s += time.perf_counter() - began
        return [Answer(*pair) for pair in zip(completions, scores, strict=True)]

    def _shuffled(self, step: int, answered: list[list[Answer]]) -> Iterator[list[Answer]]:
        """Permute the scores of all groups of a step at random."""
        scores = [answer.score for answers in answered for answer in answers]
        generator = torch.Generator().manual_seed(derive_seed(self._config.run.seed, step, self._ranks.rank))
        permuted = iter([scores[index] for index in torch.randperm(len(scores), generator=generator).tolist()])
        return ([replace(answer, score=next(permuted)) for answer in answers] for answers in answered)


def _refuse_unfinished(problem: Problem, completion: Completion) -> None:
    """Raise for an answer that is no whole sample, from which nothing may be learned: ValueError where the engine's KV
    cache had no room for it, EngineFailed where it was aborted. Both name the row."""
    if (why := completion.why_unfinished) is None:
        return
    where = f"sample {completion.index} of {problem.source or repr(problem.prompt[:100])}"
    reason = completion.finish_reason
    if reason is not None and reason.type in ("ignored", "length"):
        raise ValueError(f"{where}: {why}: raise engine.kv_cache, or lower rollout.max_new_tokens")
    raise EngineFailed(f"{where} was not finished: {why}; {RESUME}")
