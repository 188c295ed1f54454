"""The rows of a proof: which known tokens run together, in which blocks, and from which of their rows is drawn.

    phase 0   | prompt of group 0 | prompt of group 1 | ...                    rows that nothing is drawn from: only
                                                                               their KV is computed, and for several
                                                                               samples of a prompt once
    phase 1   | output of sample 0 | output of sample 1 | ...                  its KV: the prompt's full blocks, then
                                                                               a copy of its last part, then its own

The first token is drawn from the prompt's last row, which is in phase 1; behind a sample's last token nothing is drawn,
so that it has no row. Planning is pure; `prover.py` runs the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .claim import Claim, ClaimedSpan


@dataclass(frozen=True, eq=False)
class Task:
    """One span of one claim, which is drawn again as a whole."""

    number: int  # of the claim, for the caller
    claim: Claim
    span: ClaimedSpan

    @property
    def num_rows(self) -> int:
        """The number of known tokens that run."""
        return self.claim.num_prompt_tokens + self.span.end - 1

    @property
    def first_drawn(self) -> int:
        """The first row that is drawn from."""
        return self.claim.num_prompt_tokens + self.span.start - 1

    @property
    def weights(self) -> tuple[str, ...]:
        """The digests of the weights that compute its rows, one after another; the last ones draw."""
        assert self.span.digest is not None
        return (*(str(kept.digest) for kept in self.span.kept), self.span.digest)

    @property
    def ends(self) -> tuple[int, ...]:
        """The row behind those of each of these weights."""
        return (*(kept.end for kept in self.span.kept), self.num_rows)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows first .. end-1 of a sequence that run together, over the blocks of a table."""

    task: Task  # its tokens; of a shared prompt, any sample's
    first: int
    end: int
    table: np.ndarray  # int32: block ids
    first_drawn: int  # the rows from here on are drawn from; `end`: none

    @property
    def num_drawn(self) -> int:
        return self.end - self.first_drawn


@dataclass(eq=False)
class Batch:
    """Samples that are proven with the same weights, whose KV is in memory together."""

    weights: tuple[str, ...]
    groups: list[list[Task]] = field(default_factory=list)  # those of one prompt together
    num_blocks: int = 0


def batches(tasks: Sequence[Task], block_size: int, most_blocks: int) -> list[Batch]:
    """Divide the tasks into batches of at most `most_blocks` blocks, those of the same weights and prompt together.

    A sample that needs more blocks alone has a batch of its own. Tasks keep their order within their weights.
    """
    groups: dict[tuple[tuple[str, ...], tuple[int, ...], bool], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.weights, task.claim.prompt_ids, bool(task.span.kept)), []).append(task)
    newest: dict[tuple[str, ...], Batch] = {}
    found: list[Batch] = []
    for (weights, _, _), members in groups.items():
        for part in _parts(members, block_size, most_blocks):
            size = num_blocks(part, block_size)
            batch = newest.get(weights)
            if batch is None or batch.num_blocks + size > most_blocks:
                batch = newest[weights] = Batch(weights)
                found.append(batch)
            batch.groups.append(part)
            batch.num_blocks += size
    return sorted(found, key=lambda batch: batch.weights)  # so that weights change seldom


def _parts(members: list[Task], block_size: int, most_blocks: int) -> Iterator[list[Task]]:
    """Divide a group that needs more blocks than there are."""
    part: list[Task] = []
    num_alone = 0
    for task in members:
        own = -(-task.num_rows // block_size)
        if part and _num_blocks(part[0], len(part) + 1, num_alone + own, block_size) > most_blocks:
            yield part
            part, num_alone = [], 0
        part.append(task)
        num_alone += own
    yield part


def shares(group: Sequence[Task]) -> bool:
    """Return whether the prompt of a group runs once for all."""
    return _share(group[0], len(group))


def _share(first: Task, num_tasks: int) -> bool:
    return num_tasks > 1 and not first.span.kept


def num_blocks(group: Sequence[Task], block_size: int) -> int:
    """Return the number of blocks that the rows of a group need."""
    return _num_blocks(group[0], len(group), sum(-(-task.num_rows // block_size) for task in group), block_size)


def _num_blocks(first: Task, num_tasks: int, num_alone: int, block_size: int) -> int:
    """Return the number of blocks of a group. num_alone: those of its tasks, if each had its prompt to itself."""
    if not _share(first, num_tasks):
        return num_alone
    shared = first.claim.num_prompt_tokens - 1
    return -(-shared // block_size) + num_alone - num_tasks * (shared // block_size)


@dataclass(frozen=True, eq=False)
class Phase:
    """Rows that run one after another with the same weights."""

    weights: int  # the index of these among the batch's
    rows: list[Rows]
    is_drawn: bool  # whether anything is drawn from them


@dataclass(frozen=True, eq=False)
class Plan:
    """The rows of one batch, phase by phase."""

    phases: tuple[Phase, ...]
    copies: np.ndarray  # int64 [2, C]: blocks that are copied before anything is drawn, to blocks of samples


def plan(batch: Batch, block_size: int) -> Plan:
    """Lay out the rows of a batch in blocks 0, 1, ..., `batch.num_blocks` - 1."""
    free = 0

    def take(num: int) -> np.ndarray:
        nonlocal free
        free += num
        return np.arange(free - num, free, dtype=np.int32)

    undrawn: list[list[Rows]] = [[] for _ in batch.weights]
    drawn: list[Rows] = []
    copies: list[tuple[int, int]] = []
    for group in batch.groups:
        if not shares(group):
            for task in group:
                table, first = take(-(-task.num_rows // block_size)), 0
                for index, end in enumerate((*task.ends[:-1], task.first_drawn)):
                    if end > first:
                        undrawn[index].append(Rows(task, first, end, table, end))
                        first = end
                drawn.append(Rows(task, first, task.num_rows, table, first))
            continue
        shared = group[0].claim.num_prompt_tokens - 1
        table, full = take(-(-shared // block_size)), shared // block_size
        if shared:
            undrawn[0].append(Rows(group[0], 0, shared, table, shared))
        for task in group:
            own = take(-(-task.num_rows // block_size) - full)
            if shared % block_size:
                copies.append((int(table[-1]), int(own[0])))
            whole = np.concatenate([table[:full], own])
            drawn.append(Rows(task, shared, task.num_rows, whole, task.first_drawn))
    phases = [Phase(index, rows, is_drawn=False) for index, rows in enumerate(undrawn) if rows]
    phases.append(Phase(len(batch.weights) - 1, drawn, is_drawn=True))
    return Plan(tuple(phases), np.array(copies, np.int64).reshape(-1, 2).T)


def forwards(rows: Sequence[Rows], most_rows: int, most_drawn: int) -> Iterator[list[Rows]]:
    """Divide rows into forwards of at most `most_rows` rows, and draws from at most `most_drawn` of them.

    A sequence that does not fit goes on in the next forward.
    """
    step: list[Rows] = []
    num_rows = num_drawn = 0
    for whole in rows:
        first = whole.first
        while first < whole.end:
            undrawn = max(whole.first_drawn - first, 0)
            room = min(most_rows - num_rows, whole.end - first, undrawn + most_drawn - num_drawn)
            if room <= 0:
                yield step
                step, num_rows, num_drawn = [], 0, 0
                continue
            part = Rows(whole.task, first, first + room, whole.table, min(max(whole.first_drawn, first), first + room))
            step.append(part)
            num_rows, num_drawn, first = num_rows + room, num_drawn + part.num_drawn, first + room
    if step:
        yield step
