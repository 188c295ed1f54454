"""How often the tokens of drafts are accepted, by source, class of proposal and depth."""

from __future__ import annotations

from collections.abc import Iterator

PRIOR = 0.5  # chance of a token before any was tried
PRIOR_WEIGHT = 2.0  # tokens that the prior counts for
MEMORY = 0.97  # share of a count that each further draft keeps: a change shows after some tens of drafts
MAX_DEPTH = 4  # depths from here on are counted together


class Acceptance:
    """Chances of drafted tokens to be accepted if those before them were, learned from drafts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[list[float]]] = {}  # by source and class, by depth: tried, accepted

    def chances(self, source: str, confidence: int, num_tokens: int) -> Iterator[float]:
        """Yield for each of so many tokens of a draft the chance that it and all before it are accepted."""
        counts, chance = self._counts.get((source, confidence)), 1.0
        for depth in range(num_tokens):
            tried, accepted = counts[min(depth, MAX_DEPTH - 1)] if counts else (0.0, 0.0)
            chance *= (accepted + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
            yield chance

    def of_source(self, source: str) -> float:
        """Return the largest chance of a first token among the source's classes."""
        first = [counts[0] for (name, _), counts in self._counts.items() if name == source]
        return max(((accepted + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT) for tried, accepted in first),
                   default=PRIOR)  # fmt: skip

    def learn(self, source: str, confidence: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from one draft: tokens behind the first rejected one were not tried."""
        counts = self._counts.setdefault((source, confidence), [[0.0, 0.0] for _ in range(MAX_DEPTH)])
        num_tried = min(num_accepted + 1, num_drafted)
        for depth in range(min(num_tried, MAX_DEPTH)):
            counts[depth] = [MEMORY * count for count in counts[depth]]
        for depth in range(num_tried):
            at = counts[min(depth, MAX_DEPTH - 1)]
            at[0] += 1
            at[1] += depth < num_accepted
