"""The result of a comparison as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .comparison import LOGPROB, Element, Explanation, OperationGap, apart
from .recording import Recording
from .scores import TokenGap
from .sequence import TokenSequence
from .ways import Way

SHOWN = 6  # operations behind the first that differs, and tokens, where not all are asked for


@dataclass(frozen=True)
class Report:
    """The result of a comparison, with its runs."""

    sequence: TokenSequence
    ways: tuple[Way, Way]
    recordings: tuple[Recording, Recording]
    explanation: Explanation
    reported: tuple[TokenGap, ...] = ()  # the sequence's own reported log-probabilities beside the first way's
    scores: tuple[TokenGap, ...] = ()  # those of another engine beside the first way's
    # Those that the engines of the two ways give when no operation is recorded, beside the recorded ones.
    plain: tuple[tuple[TokenGap, ...], tuple[TokenGap, ...]] = ((), ())
    tolerance: float = 0.0  # nats that a reported log-probability may differ

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs that was compared."""
        reported = (*self.reported, *self.scores)
        return self.explanation.first is None and not any(map(self._parts, reported)) and not any(self._unlike())

    def _unlike(self) -> list[int]:
        """Return the number of tokens of each way that recording changes: of the kernels' usual calls."""
        return [sum(gap.ulps > 0 for gap in gaps) for gaps in self.plain]

    def _parts(self, gap: TokenGap) -> bool:
        return gap.ulps > 0 and not abs(gap.difference) <= self.tolerance

    def lines(self, *, shows_all: bool) -> Iterator[str]:
        """Yield the report for people, line by line."""
        sequence, explanation = self.sequence, self.explanation
        num_prompt, num_output = len(sequence.prompt_ids), len(sequence.token_ids)
        yield f"sequence   {sequence.source or 'given'}: {num_prompt} tokens and {num_output} after them"
        if sequence.logprobs and not sequence.is_temperature_known:
            yield "           temperature 1 is assumed of its log-probabilities: it names none (--temperature)"
        for name, its in zip(("first", "second"), self.recordings, strict=True):
            for index, note in enumerate(its.notes):
                yield f"{name if not index else '':10} {note}"
        num_rows = max(gap.num_rows for gap in explanation.gaps)
        yield f"compared   {len(explanation.gaps)} operations at {num_rows} positions, in units of {explanation.dtype}"
        yield from self._parting(shows_all)
        for name, number, gaps in zip(("first", "second"), self._unlike(), self.plain, strict=True):
            if number:
                worst = max(abs(gap.difference) for gap in gaps)
                yield (
                    f"recorded   the {name} way gives {number} other log-probabilities when nothing is recorded, by up "
                    f"to {worst:.3g} nats: look at its fused kernels and recorded decode steps"
                )
        for name, only in zip(("first", "second"), explanation.only, strict=True):
            if only:
                listed = ", ".join(op.describe() for op in (only if shows_all else only[:2]))
                more = "" if shows_all or len(only) <= 2 else f" and {len(only) - 2} more"
                yield f"not compared: in the {name} way only, or of another shape: {listed}{more}"
        yield from self._tokens("reported", self.reported, shows_all)
        yield from self._tokens("scores", self.scores, shows_all)

    def _parting(self, shows_all: bool) -> Iterator[str]:
        differing = list(apart(self.explanation))
        if not differing:
            yield "equal      every operation at every position, bit for bit"
            return
        first = differing[0]
        assert first.first is not None
        yield f"parts      {first.operation.describe()}"
        yield f"           {self._element(first.first)}"
        yield f"           {_extent(first)}"
        behind = differing[1:] if shows_all else list(_without_copies(differing))[1:]
        rest = behind if shows_all else behind[:SHOWN]
        for index, gap in enumerate(rest):
            yield f"{'' if index else 'then':10} {gap.operation.describe()}: {_extent(gap)}"
        if left := len(behind) - len(rest):
            yield f"           ... and {left} more operations (--all)"
        last = differing[-1]
        if last.operation == LOGPROB and last not in rest and last is not first:
            yield f"at last    {last.operation.describe()}: {_extent(last)}"

    def _element(self, element: Element) -> str:
        if element.operation == LOGPROB:
            token = self.sequence.ids[element.position]
            where = f"token {element.position} ({token})"
        else:
            token = self.sequence.ids[element.position]
            where = f"row {element.position} (token {token}), element {', '.join(map(str, element.index))}"
        return f"{where}: {element.first!r} and {element.second!r}, {_ulps(element.ulps)} apart"

    def _tokens(self, name: str, gaps: Sequence[TokenGap], shows_all: bool) -> Iterator[str]:
        """Yield lines about reported log-probabilities: the first that parts, and how much each differs."""
        if not gaps:
            return
        parting = [gap for gap in gaps if self._parts(gap)]
        if not parting:
            bits = "bit for bit" if not any(gap.ulps for gap in gaps) else f"within {self.tolerance:g} nats"
            yield f"{name:10} all {len(gaps)} log-probabilities are the first way's, {bits}"
            return
        first, worst = parting[0], max(parting, key=lambda gap: abs(gap.difference))
        yield (
            f"{name:10} {len(parting)} of {len(gaps)} log-probabilities part, the first at token {first.position} "
            f"({first.token_id}), the most at token {worst.position}: {worst.difference:+.3g} nats"
        )
        shown = gaps if shows_all else parting[:SHOWN]
        for gap in shown:
            yield (
                f"           token {gap.position} ({gap.token_id}): {gap.own!r} here, {gap.reported!r} reported, "
                f"{gap.difference:+.3g} nats, {_ulps(gap.ulps)}"
            )
        if not shows_all and (left := len(parting) - len(shown)):
            yield f"           ... and {left} more tokens (--all)"

    def as_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        explanation = self.explanation
        return {
            "equal": self.is_equal,
            "sequence": {"source": self.sequence.source, "prompt_tokens": len(self.sequence.prompt_ids),
                         "output_tokens": len(self.sequence.token_ids),
                         "temperature": self.sequence.temperature,
                         "is_temperature_known": self.sequence.is_temperature_known},
            "ways": [
                {"way": way.describe(), "notes": its.notes} for way, its in zip(self.ways, self.recordings, strict=True)
            ],
            "dtype": explanation.dtype,
            "first": None if explanation.first is None else _element_json(explanation.first),
            "operations": [_gap_json(gap) for gap in explanation.gaps],
            "only": [[operation._asdict() for operation in its] for its in explanation.only],
            "plain": [[_token_json(gap) for gap in gaps] for gaps in self.plain],
            "reported": [_token_json(gap) for gap in self.reported],
            "scores": [_token_json(gap) for gap in self.scores],
        }  # fmt: skip


def _without_copies(gaps: Sequence[OperationGap]) -> Iterator[OperationGap]:
    """Yield the operations without those that hand on what an operation before gave: inputs, and whole modules."""
    seen: set[tuple[int, int, int, float]] = set()
    for gap in gaps:
        extent = (gap.num_rows, gap.num_rows_apart, gap.max_ulps, gap.max_difference)
        if extent not in seen:
            yield gap
        seen.add(extent)


def _extent(gap: OperationGap) -> str:
    return (
        f"{gap.num_rows_apart} of {gap.num_rows} rows differ, by up to {_ulps(gap.max_ulps)} ({gap.max_difference:.3g})"
    )


def _ulps(number: int) -> str:
    if number > 2**60:
        return "no number (NaN)"
    return f"{number} ulp{'' if number == 1 else 's'}"


def _element_json(element: Element) -> dict[str, Any]:
    return asdict(element) | {"operation": element.operation._asdict()}


def _gap_json(gap: OperationGap) -> dict[str, Any]:
    first = None if gap.first is None else _element_json(gap.first)
    return asdict(gap) | {"operation": gap.operation._asdict(), "first": first}


def _token_json(gap: TokenGap) -> dict[str, Any]:
    return asdict(gap) | {"difference": gap.difference}
