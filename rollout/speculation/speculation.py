"""The drafts of an engine's steps: whom to ask, how much of it to take, and what has come of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ..config import DRAFT_SOURCES as SOURCES
from ..config import MAX_DRAFT, EngineConfig
from ..sequences.request import Request
from ..sequences.step import Confidence
from .acceptance import Acceptance
from .added_source import AddedSource
from .caller import CallersDraft
from .lengths import BestRate, Lengths, StepSize
from .no_draft import NoDraft, Reasons
from .own_past import OwnPast
from .proposer import NO_PROPOSAL, Proposal, Proposer
from .rests import Rests
from .samples import History, Samples, Siblings
from .step_costs import StepCosts

logger = logging.getLogger(__name__)

DEPTH = 16  # tokens of a draft, at most, of a source without a number of its own
NUM_ASKED = 8  # sequences for which sources are asked before drafts pay: a search for hundreds takes a step's time
LIKELY = 0.8  # chance of a first token with which no further source is asked
TRIAL_SHARE = 8  # of so many sequences, one tries a token after a rest
SPARE = 4  # tokens that are asked for beyond the longest draft that was taken lately: a vote on each takes time
REACH_MEMORY = 0.9  # share of that length that each further step keeps


# The report of an engine without speculation.
OFF: dict[str, object] = {"why_not": 'EngineConfig.speculation is "off"', "is_resting": False, "num_without": {},
                          "history_bytes": 0, "num_prompts_kept": 0, "sources": {}}  # fmt: skip


class Wanted(NamedTuple):
    """A sequence that may have a draft in a step."""

    request: Request
    most: int  # tokens


class Planned(NamedTuple):
    """A draft before the step has room for it."""

    token_ids: tuple[int, ...]
    source: str
    confidence: Confidence


class _Asked(NamedTuple):
    """The proposal for a sequence, and the chances of its tokens, each with all before it."""

    source: str
    proposal: Proposal
    chances: tuple[float, ...]


@dataclass
class SourceCounts:
    """Counts of the drafts of one source."""

    num_drafts: int = 0
    num_drafted: int = 0  # tokens that had a row
    num_accepted: int = 0  # tokens among them, each of which needed no step of its own
    num_refused: int = 0  # proposed tokens that had no row: more than were asked for, or from one on that is no token


class Speculation:
    """Ask the sources for drafts, and learn which pay. The loop's thread calls it."""

    def __init__(
        self,
        depths: Mapping[str, int],
        max_history_bytes: int,
        vocab_size: int,
        computed_rows: Callable[[int], int] = lambda num_rows: num_rows,
        *,
        search_is_dear: bool = False,
    ) -> None:
        """Create it with the sources named in `depths`, each with the largest number of tokens of its drafts.

        computed_rows: the rows that a step of so many computes, padding included. search_is_dear: see `Rests`.
        """
        self._vocab_size = vocab_size
        past = OwnPast()
        self.samples = Samples(past, max_history_bytes if "history" in depths or "siblings" in depths else 0)
        makes: dict[str, Callable[[], Proposer]] = {
            "caller": CallersDraft,
            "siblings": lambda: Siblings(self.samples),
            "history": lambda: History(self.samples),
            "past": lambda: past,
        }
        self._sources: dict[str, Proposer] = {name: makes[name]() for name in SOURCES if name in depths}
        self._depths = dict(depths)
        # Who is not asked still hears of ends: others read what it keeps.
        hearers: tuple[Proposer, ...] = (Siblings(self.samples), past, *self._sources.values())
        self._hearers = {source.name: source for source in hearers}
        self._costs, self._acceptance = StepCosts(computed_rows), Acceptance()
        self._rests = Rests(search_is_dear=search_is_dear)
        self.num_asked = 0  # sequences for which sources were asked in the newest plan
        self._reach: dict[int, float] = {}  # by class of sequences, as in `Rests`: the longest draft taken lately
        self.lengths: Lengths = BestRate(self._costs)
        self.counts: dict[str, SourceCounts] = {name: SourceCounts() for name in self._sources}
        self.reasons = Reasons()

    @classmethod
    def of(
        cls, config: EngineConfig, vocab_size: int, computed_rows: Callable[[int], int], *, search_is_dear: bool
    ) -> Speculation | None:
        """Create it as an engine is configured; None where it is off."""
        if config.speculation == "off":
            return None
        asked = config.speculation
        depths = dict.fromkeys(SOURCES, DEPTH) if isinstance(asked, str) else asked
        num_bytes = config.speculation_memory_mb << 20
        return cls(depths, num_bytes, vocab_size, computed_rows, search_is_dear=search_is_dear)

    def add_source(self, source: Proposer, depth: int = DEPTH) -> None:
        """Ask a further source. Raises ValueError for a name that another has, or a depth out of range."""
        if source.name in self._hearers:
            raise ValueError(f"a source of drafts named {source.name!r} is there already")
        if not 1 <= depth <= MAX_DRAFT:
            raise ValueError(f"the depth of drafts must be from 1 to {MAX_DRAFT}, not {depth}")
        self._sources[source.name] = self._hearers[source.name] = source
        self._depths[source.name] = depth
        self.counts[source.name] = SourceCounts()

    @property
    def is_used(self) -> bool:
        """Whether there is anyone to ask."""
        return bool(self._sources)

    @property
    def keeps_history(self) -> bool:
        """Whether samples of earlier are a source."""
        return "history" in self._sources

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts."""
        return bool(self._sources) and not self._rests.is_resting

    @property
    def num_resting(self) -> int:
        """The number of steps from this one on, of a rest, that have no drafts."""
        return self._rests.num_left

    def rested(self, num_steps: int, num_sequences: int) -> None:
        """Count further steps of a rest, of so many sequences each, for which `why_none` was not asked."""
        if self._rests.is_resting:
            self._rests.further_steps(num_steps)
            self.reasons.counts[NoDraft.RESTING] += num_steps * num_sequences

    def why_none(self, size: StepSize) -> NoDraft | None:
        """Count a step, and return why none of its sequences has a draft; None: `plan` drafts. size: without drafts."""
        if not self.lengths.may_draft(size):
            return NoDraft.MEASURING
        return NoDraft.RESTING if self._rests.next_step(size.num_tokens) else None

    def most_asked(self, num_sequences: int) -> int:
        """Return for how many of so many sequences the sources are to be asked: a few while drafts do not pay."""
        return num_sequences if self._rests.pays(num_sequences) else min(num_sequences, NUM_ASKED)

    def plan(self, wanted: Sequence[Wanted], size: StepSize, budget: int) -> list[Planned | NoDraft]:
        """Return a draft for each sequence, or the reason why it has none. size: of the step without drafts; budget:
        rows that it may add."""
        if not wanted or budget <= 0:
            self.num_asked = 0
            return [NoDraft.NO_ROWS] * len(wanted)
        names = sorted(self._sources, key=self._acceptance.of_source, reverse=True)
        self.num_asked = len(wanted)
        of_size = size.num_tokens.bit_length()
        reach = self._reach.get(of_size, float(MAX_DRAFT))
        found = [self._ask(names, one, int(reach) + SPARE) for one in wanted]
        chances = [one.chances for one in found]
        lengths = self.lengths.choose(size, chances, budget)
        self._reach[of_size] = max(*lengths, REACH_MEMORY * reach)
        if not any(lengths):
            if self._rests.is_trial:
                lengths = _trial(chances, budget)
            self._rests.begin(size.num_tokens, were_proposals=any(chances))
        return [
            Planned(tuple(one.proposal.token_ids[:length]), one.source, one.proposal.confidence) if length
            else NoDraft.TOO_COSTLY if one.chances else NoDraft.NO_PROPOSAL
            for one, length in zip(found, lengths, strict=True)
        ]  # fmt: skip

    def on_draft(self, source: str, confidence: Confidence, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft of a committed step."""
        counts = self.counts[source]
        counts.num_drafts += 1
        counts.num_drafted += num_drafted
        counts.num_accepted += num_accepted
        self._acceptance.learn(source, confidence, num_drafted, num_accepted)

    def on_step_timed(self, num_rows: int, seconds: float) -> None:
        """Learn from a step of decodes and drafts."""
        self._costs.observe(num_rows, seconds)

    def on_step_planned(
        self, size: StepSize, num_asked: int, num_drafted: int, num_accepted: int, planning_s: float
    ) -> None:
        """Learn whether drafts pay, from a step for which `plan` was asked. size: without drafts; num_asked: sequences
        for which sources were asked, which stand for all; num_drafted, num_accepted: tokens of theirs.

        Where they take more time than they save, that of the search included, no source is asked for a while.
        """
        if not num_asked:
            return
        of_all = size.num_tokens / num_asked
        num_rows = size.num_rows + round(num_drafted * of_all)
        gain = self.lengths.gain(size, num_rows, num_accepted * of_all, planning_s * of_all)
        self._rests.learn(size.num_tokens, gain)

    def on_cut(self, request: Request, num_cut: int) -> None:
        """Hear that a jump has replaced the last tokens of a sequence."""
        for source in self._hearers.values():
            source.on_tokens(request, num_cut)

    def on_end(self, request: Request) -> None:
        """Hear that a request has ended."""
        for source in self._hearers.values():
            source.on_end(request)

    def report(self) -> dict[str, object]:
        """Return depths, counts and chances by source, and why there are no drafts, as plain values."""
        return {
            "why_not": self._why_not(),
            "is_resting": self._rests.is_resting,
            "num_without": {str(why): num for why, num in self.reasons.counts.items()},
            "history_bytes": self.samples.num_bytes,
            "num_prompts_kept": len(self.samples),
            "sources": {
                name: {"depth": self._depths[name], **asdict(self.counts[name]),
                       "chance": self._acceptance.of_source(name),
                       "failure": source.failure if isinstance(source, AddedSource) else None}
                for name, source in self._sources.items()
            },
        }  # fmt: skip

    def _why_not(self) -> str | None:
        """Return why the next step has no drafts; None: it may have some."""
        if not self._sources:
            return "no source is asked: the table of EngineConfig.speculation is empty"
        return self._rests.why

    def _ask(self, names: Sequence[str], wanted: Wanted, reach: int) -> _Asked:
        """Return the first likely proposal of the sources in this order, or the one that promises most. reach: tokens
        of it, at most."""
        best = _Asked("", NO_PROPOSAL, ())
        for name in names:
            most = min(wanted.most, self._depths[name], reach)
            proposal = self._sources[name].propose(wanted.request, most) if most > 0 else NO_PROPOSAL
            if not proposal.token_ids or not (usable := self._usable(name, proposal, most)).token_ids:
                continue
            one = _Asked(name, usable, tuple(self._acceptance.chances(name, usable.confidence, len(usable.token_ids))))
            if sum(one.chances) > sum(best.chances):
                best = one
            if best.chances and best.chances[0] >= LIKELY:
                break
        return best

    def _usable(self, name: str, proposal: Proposal, most: int) -> Proposal:
        """Return the beginning of a proposal that a step can take. The rest is counted, and told once for a source."""
        ids = proposal.token_ids
        if len(ids) <= most and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size:
            return proposal  # as nearly all are: each token looked at by itself took a tenth of a search
        asked = proposal.token_ids[:most]
        bad = next((i for i, id in enumerate(asked) if not (isinstance(id, int) and 0 <= id < self._vocab_size)), most)
        if (num_refused := len(proposal.token_ids) - min(bad, len(asked))) == 0:
            return proposal
        counts = self.counts[name]
        if not counts.num_refused:
            what = f"{asked[bad]!r} is no token" if bad < len(asked) else f"at most {most} were asked for"
            logger.warning("the source of drafts %r proposed tokens that are refused: %s", name, what)
        counts.num_refused += num_refused
        return proposal._replace(token_ids=asked[:bad])


def _trial(chances: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Return lengths that try one token of the likeliest proposals, to see whether drafts pay again."""
    ranked = sorted(((its[0], index) for index, its in enumerate(chances) if its), reverse=True)
    lengths = [0] * len(chances)
    for _, index in ranked[: min(max(len(chances) // TRIAL_SHARE, 1), budget)]:
        lengths[index] = 1
    return lengths
