"""Several sources of problems: at every step their shares of all prompts so far are their weights."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .problems import Problem, draw_from

_BETWEEN_COUNTS = 1024  # places of an order between two at which counts are kept


@dataclass(frozen=True)
class Source:
    """The problems of one source that are trained on."""

    weight: float  # its share of the prompts, beside those of the others
    problems: Sequence[Problem]


class SourceOrder:
    """The source of each prompt of a run, counted over all steps. Of each source the number of prompts so far differs
    from its share by less than 1, whatever their number.

    The m-th prompt of a source, from 0, may come from place floor(m / share) on, and comes before place
    ceil((m + 1) / share): of those that may come, the one that must come earliest does. Source: Baruah et al.,
    "Proportionate Progress: A Notion of Fairness in Resource Allocation", Algorithmica 15, 1996.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Take the weights as they are written: 0.1 is a tenth. They must be positive."""
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [one / sum(exact) for one in exact]
        self._period = math.lcm(*(share.denominator for share in shares))  # prompts after which the order is repeated
        self._parts = [int(share * self._period) for share in shares]
        self._order = array("I")  # of the first prompts, at most of one period
        self._counts = [0] * len(shares)  # of that order
        self._counts_at = [list(self._counts)]  # before each place that _BETWEEN_COUNTS divides

    def between(self, first: int, end: int) -> list[int]:
        """Return the numbers of the sources of the prompts from `first` to `end`. Remembers the order up to there."""
        self._extend(end)
        return [self._order[place % self._period] for place in range(first, end)]

    def counts_before(self, place: int) -> list[int]:
        """Return how many prompts of each source come before a place."""
        rounds, rest = divmod(place, self._period)
        self._extend(rest)
        known = rest // _BETWEEN_COUNTS
        begun = self._order[known * _BETWEEN_COUNTS : rest]
        counts = self._counts_at[known]
        return [rounds * part + counts[source] + begun.count(source) for source, part in enumerate(self._parts)]

    def _extend(self, num: int) -> None:
        parts, counts, period = self._parts, self._counts, self._period
        for place in range(len(self._order), min(num, period)):
            may_come = (source for source, count in enumerate(counts) if count * period < (place + 1) * parts[source])
            chosen = min(may_come, key=lambda source: -(-(counts[source] + 1) * period // parts[source]))
            counts[chosen] += 1
            self._order.append(chosen)
            if (place + 1) % _BETWEEN_COUNTS == 0:
                self._counts_at.append(list(counts))


class Mixture:
    """The training problems of each step, from several sources: a pure function of the run's seed, step and attempt."""

    def __init__(self, sources: Mapping[str, Source], seed: int) -> None:
        self._sources, self._seed = list(sources.items()), seed
        self._order = SourceOrder([source.weight for source in sources.values()])

    def __call__(self, step: int, num_problems: int, attempt: int = 0) -> list[Problem]:
        """Draw the problems of a step. attempt: above 0, others of the same sources to take their places."""
        first = step * num_problems
        places = self._order.between(first, first + num_problems)
        # Ranks take every so-many-th prompt of a step: in the plain order one could have those of one source alone.
        random.Random(f"sources/{self._seed}/{step}").shuffle(places)
        before = self._order.counts_before(first)
        drawn = [
            iter(draw_from(source.problems, f"{self._seed}/{name}", step, before[at], places.count(at), attempt))
            for at, (name, source) in enumerate(self._sources)
        ]
        return [next(drawn[at]) for at in places]


def divided_by_weight(num: int, weights: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Divide a number in proportion to weights, with at most so many for each; less than `num` where the limits are.
    Source: the method of Webster and Sainte-Laguë, one seat after the other."""
    given = [0] * len(weights)
    for _ in range(min(num, sum(limits))):
        free = [at for at, limit in enumerate(limits) if given[at] < limit]
        given[min(free, key=lambda at: (given[at] + 0.5) / weights[at])] += 1
    return given
