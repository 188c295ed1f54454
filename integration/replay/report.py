"""The answers of a replay: one verdict a receipt, with what was found about all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...rollout.proving.claim import Drawn, Verdict

EQUAL, DIFFERS, UNPROVEN = 0, 1, 3  # exit codes; 2 is a mistake of the caller


@dataclass(frozen=True)
class ReplayReport:
    """The verdicts of a replay, in the order of the receipts."""

    ids: tuple[str, ...]  # of the samples
    verdicts: tuple[Verdict, ...]
    guarantee: tuple[str, ...] = ()  # what differs between the receipts' guarantee and this machine's
    versions: tuple[str, ...] = ()  # libraries of other versions here, which may change bits
    chain: tuple[str, ...] = ()  # receipts that do not follow on one another
    batch: str = ""  # hash over the receipts' hashes
    num_absent: int = 0  # receipts, by their numbers, between those that were given of one engine

    def with_samples(self, others: Mapping[int, Verdict]) -> ReplayReport:
        """Return the report with these verdicts on the samples beside receipts, by the receipts' numbers: a receipt
        that is proven is none of another sample."""
        order = ("equal", "unproven", "differs")
        verdicts = list(self.verdicts)
        for number, other in others.items():
            own = verdicts[number]
            if order.index(other.status) > order.index(own.status):
                verdicts[number] = replace(other, num_tokens=own.num_tokens)
        return replace(self, verdicts=tuple(verdicts))

    def num(self, status: str) -> int:
        """Return how many samples have this status: "equal", "differs" or "unproven"."""
        return sum(verdict.status == status for verdict in self.verdicts)

    @property
    def exit_code(self) -> int:
        """The exit code: 0 where all samples are proven equal; 1 where some differ, or the chain is broken; 3 where
        some could not be proven."""
        if self.num("differs") or self.chain:
            return DIFFERS
        return UNPROVEN if self.num("unproven") else EQUAL

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "samples": len(self.verdicts),
            **{status: self.num(status) for status in ("equal", "differs", "unproven")},
            "guarantee": list(self.guarantee),
            "versions": list(self.versions),
            "chain": list(self.chain),
            "batch": self.batch,
            "absent": self.num_absent,
            "verdicts": [
                {"number": number, "id": id, **{k: v for k, v in asdict(verdict).items() if v is not None and v != ""}}
                for number, (id, verdict) in enumerate(zip(self.ids, self.verdicts, strict=True))
            ],
        }

    def lines(self, most: int = 20) -> Iterator[str]:
        """Yield the report as text: what differs first, at most so many samples of a kind. Characters that would end a
        line, or that cannot be written, are escaped: receipts may hold any."""
        for line in self._lines(most):
            yield line if line.isprintable() else ascii(line)[1:-1]

    def _lines(self, most: int) -> Iterator[str]:
        if self.guarantee:
            yield f"this machine's guarantee is another one: {'; '.join(self.guarantee)}"
        if self.versions:
            yield f"other versions here, which may change bits: {'; '.join(self.versions)}"
        yield from self.chain
        if self.num_absent:
            yield f"{self.num_absent} receipts that the same engine made in between are not among these"
        for status in ("differs", "unproven"):
            of_kind = [pair for pair in enumerate(self.verdicts) if pair[1].status == status]
            for number, verdict in of_kind[:most]:
                yield f"sample {number} ({self.ids[number]}): {text_of(verdict)}"
            if len(of_kind) > most:
                yield f"... and {len(of_kind) - most} more"
        equal, all = self.num("equal"), len(self.verdicts)
        tokens = sum(verdict.num_tokens for verdict in self.verdicts)
        rest = f"{self.num('differs')} differ, {self.num('unproven')} unproven"
        yield f"{equal} of {all} samples proven equal, {rest}; {tokens} tokens drawn again"


def text_of(verdict: Verdict) -> str:
    """Return one verdict as text."""
    if verdict.status == "equal":
        return "equal"
    if verdict.status == "unproven":
        return f"not proven: {verdict.what}"
    if verdict.position is None:
        return verdict.what
    where = f"{verdict.what} differs at output position {verdict.position}"
    if verdict.claimed is None:
        return where
    return f"{where}: claimed {_drawn(verdict.claimed)}, drawn {_drawn(verdict.found)}"


def _drawn(drawn: Drawn | None) -> str:
    if drawn is None:
        return "no token"
    return f"token {drawn.token_id} with log-probability {drawn.logprob!r} (bits {drawn.bits:08x})"


def ids_of(receipts: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the ids of receipts."""
    return tuple(str(receipt.get("id", "")) for receipt in receipts)
