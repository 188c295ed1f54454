"""The answers of a step on one rank, with their scores, and the samples that they are for the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ....rollout.completion import Completion, WeightSpan
from ....rollout.media.images import Images
from ..environments.episode import Episode
from ..rewards.score import Score
from ..tasks.problems import Problem
from ..training.packing import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """One sample of a problem, with its score."""

    completion: Completion  # of an episode: the sampled tokens
    score: Score
    episode: Episode | None = None  # where the job has an environment

    @property
    def images(self) -> tuple[Images, ...]:
        """The images of its prompts."""
        if self.episode is not None:
            return self.episode.all_images
        drawn = self.completion.drawn_with
        return () if drawn is None or drawn.images is None else (drawn.images,)

    def samples(self, step: int, advantage: float, *, counts: bool, group: int = 0) -> Iterator[Sample]:
        """Yield it for the trainer of a step: a sample, or one of each conversation of an episode. group: the number of
        its prompt in the rank's step."""
        if self.episode is None:
            done, images = self.completion, self.images
            yield Sample(
                done.prompt_ids, done.token_ids, done.logprobs, advantage, _num_older(done.weight_versions, step),
                counts, forced=done.forced, images=images[-1] if images else None, group=group,
            )  # fmt: skip
            return
        parts = []
        for one in self.episode.conversations:
            images = one.images  # the last of them are all that are among its tokens
            parts.append(Sample(
                one.prompt_ids, one.token_ids, one.logprobs, advantage, _num_older(one.weight_versions, step), counts,
                one.sampled, one.forced, images[-1] if images else None,
            ))  # fmt: skip
        size = sum(part.size for part in parts)
        first = next((part for part in parts if part.size), parts[0])
        yield from (replace(part, answer_size=size, is_first=part is first, group=group) for part in parts)


@dataclass
class StepSamples:
    """The answers of one step so far, with their rewards."""

    answers: list[Answer] = field(default_factory=list)  # with the scores that are trained on
    advantages: list[float] = field(default_factory=list)  # of each answer
    problems: list[Problem] = field(default_factory=list)  # of each answer
    waited_s: float = 0.0  # for the engine, or while it generated in this process; with an environment for episodes
    scored_s: float = 0.0  # for rewards
    num_redrawn: int = 0  # groups that were drawn in the place of others
    num_discarded_tokens: int = 0  # of those others
    num_flat: int = 0  # groups of `answers` whose compared rewards are all equal; counted with `rollout.redraw`

    @property
    def completions(self) -> list[Completion]:
        """The completions of the answers."""
        return [answer.completion for answer in self.answers]

    @property
    def scores(self) -> list[Score]:
        """The scores of the answers."""
        return [answer.score for answer in self.answers]


def _num_older(spans: Sequence[WeightSpan], step: int) -> int:
    """Return the number of tokens that older weights than a step's have drawn: the first ones."""
    return sum(span.end - span.start for span in spans if lag_of(span, step))


def lag_of(span: WeightSpan, step: int) -> int:
    """Return how many commits before a step's weights those of a span were.

    The job's versions are the numbers of its commits; 0 for a label that an administrator gave the weights over HTTP.
    """
    version = span.version
    return max(step - int(version), 0) if version.isdecimal() and len(version) <= len(str(step)) else 0


def waited(groups: Iterator[T], into: StepSamples) -> Iterator[T]:
    """Yield groups, and note how long they were waited for."""
    while True:
        began = time.perf_counter()
        found = next(groups, None)
        into.waited_s += time.perf_counter() - began
        if found is None:
            return
        yield found
