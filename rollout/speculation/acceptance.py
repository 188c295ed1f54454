"""How often the tokens of drafts are accepted, by source and class of the token.

A class is a vote of earlier places, or the class of the proposal and the token's depth. The chance of a vote before it
was tried is that of its majority, as the score of a path in SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..sequences.step import Confidence, Vote

PRIOR = 0.5  # chance of a token before any was tried, without a vote
PRIOR_WEIGHT = 2.0  # tokens that the prior counts for
MEMORY = 0.97  # share of a count that each further draft keeps: a change shows after some tens of drafts
FORGETTING = 64  # drafts of a source after which counts by depth are halved: one that is tried no more gets its prior
NUM_DEPTHS = 4  # that are counted: the last of them with all behind it

Class = Vote | tuple[int, int]  # of a token: a vote; or the class of its proposal, and its depth


class Acceptance:
    """Chances of drafted tokens to be accepted if those before them were, learned from drafts."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Class, list[float]]] = {}  # by source: tried, accepted
        self._num_drafts: dict[str, int] = {}  # by source, since its counts were halved
        self._chances: dict[str, dict[Class, float]] = {}  # of the counted classes
        self._firsts: dict[str, dict[Class, float]] = {}  # of those among them that a first token may have

    def chances(self, source: str, confidence: Confidence, num_tokens: int) -> Iterator[float]:
        """Yield for each of so many tokens of a draft the chance that it and all before it are accepted."""
        known, chance = self._chances.get(source, {}), 1.0
        for one in _classes(confidence, num_tokens):
            its = known.get(one)
            chance *= _chance(one, None) if its is None else its
            yield chance

    def of_source(self, source: str) -> float:
        """Return the largest chance of a token among the source's classes, of first ones where depths are known."""
        return max(self._firsts.get(source, {}).values(), default=PRIOR)

    def learn(self, source: str, confidence: Confidence, num_drafted: int, num_accepted: int) -> None:
        """Learn from one draft: tokens behind the first rejected one were not tried."""
        self._num_drafts[source] = self._num_drafts.get(source, 0) + 1
        if self._num_drafts[source] == FORGETTING:
            self._halve(source)
        counts = self._counts.setdefault(source, {})
        tried = list(_classes(confidence, min(num_accepted + 1, num_drafted)))
        classes = set(tried)
        for one in classes:
            counts[one] = [MEMORY * count for count in counts.get(one, (0.0, 0.0))]
        for depth, one in enumerate(tried):
            counts[one][0] += 1
            counts[one][1] += depth < num_accepted
        self._keep_chances(source, classes)

    def _halve(self, source: str) -> None:
        """Halve the counts of the classes by depth. A vote has a prior of its own, which is seldom far off."""
        self._num_drafts[source] = 0
        counts = self._counts.get(source, {})
        by_depth = [one for one in counts if not isinstance(one, Vote)]
        for one in by_depth:
            counts[one] = [count / 2 for count in counts[one]]
        self._keep_chances(source, by_depth)

    def _keep_chances(self, source: str, classes: Iterable[Class]) -> None:
        counts = self._counts.get(source, {})
        chances, firsts = self._chances.setdefault(source, {}), self._firsts.setdefault(source, {})
        for one in classes:
            chances[one] = _chance(one, counts[one])
            if isinstance(one, Vote) or one[1] == 0:
                firsts[one] = chances[one]


def _classes(confidence: Confidence, num_tokens: int) -> Iterator[Class]:
    if isinstance(confidence, int):
        return ((confidence, min(depth, NUM_DEPTHS - 1)) for depth in range(num_tokens))
    return iter(confidence[:num_tokens])


def _chance(one: Class, count: list[float] | None) -> float:
    prior = (one.num_alike + PRIOR) / (one.num_places + 1) if isinstance(one, Vote) else PRIOR
    tried, accepted = count or (0.0, 0.0)
    return (accepted + prior * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
