"""The tensors of one step, made from the scheduler's output and the worker manager's sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.paged import PagedStep
from ..media.images import ImageRows
from ..media.rows import image_rows, moved_rows
from ..sequences.request import Request
from ..sequences.sequence import Sequence
from ..sequences.step import ScheduledSequence, ScheduleOutput
from ..sequences.worker_manager import WorkerSequenceManager


@dataclass(frozen=True)
class KnownRows:
    """Rows whose logits give log-probabilities of tokens that one sequence already has."""

    request: Request
    token_ids: list[int]  # one a row: the token after it, a copy, since a preemption may undo a jump meanwhile


class SampledRow(NamedTuple):
    """A row from which a token is drawn."""

    request: Request
    drafted: tuple[int, ...] = ()  # tokens of the sequence's draft, up to this row's own: not part of the sequence yet

    @property
    def num_tokens(self) -> int:
        """The number of tokens before the drawn one, which is also its position."""
        return self.request.sequence.num_tokens + len(self.drafted)


@dataclass(frozen=True)
class Batch:
    """The tensors of one step. Rows are grouped by sequence, in the order of the schedule.

    Each row of a draft stands as a sequence of its own in `paged` and `states`: with the same blocks and one more token
    than the row before, whose states it continues.
    """

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]: where each row's KV goes
    paged: PagedStep
    logit_rows: Tensor  # int64: rows whose logits are needed: the sampled ones, then the prompts', then the jumps'
    sampled: tuple[SampledRow, ...]
    prompts: tuple[KnownRows, ...]
    jumps: tuple[KnownRows, ...] = ()  # of tokens of jumps that are not settled
    allowed: tuple[bytes | None, ...] = ()  # per sampled row: the tokens its grammar allows; empty: no grammars
    is_decode: bool = False  # every row is sampled from, and none is read for anything else
    states: Tensor | None = None  # int64 [2, S]: slots that the sequences read and write; None: no recurrent layers
    images: ImageRows | None = None  # None: no row has or follows images

    @property
    def rotary_positions(self) -> Tensor:
        """The positions of the module's rotary, int64 [N] or, by part of it, [S, N]."""
        moved = None if self.images is None else self.images.positions
        return self.positions if moved is None else moved

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; returns itself if it is there already."""
        if self.slots.device == device:
            return self
        to: dict[str, Any] = {"device": device, "non_blocking": True}
        paged = self.paged
        return replace(
            self,
            token_ids=self.token_ids.to(**to), positions=self.positions.to(**to), slots=self.slots.to(**to),
            paged=PagedStep(
                paged.block_tables.to(**to), paged.query_start.to(**to), paged.context_lens.to(**to)
            ),
            logit_rows=self.logit_rows.to(**to),
            states=None if self.states is None else self.states.to(**to),
            images=None if self.images is None else self.images.to(device),
        )  # fmt: skip


def build_batch(
    output: ScheduleOutput,
    workers: WorkerSequenceManager,
    requests: Mapping[str, Request],
    block_size: int,
    device: torch.device,
) -> Batch:
    """Lay out the scheduled rows. Changes nothing. A decode step costs the same however long its contexts are."""
    items = output.scheduled
    num_drafted = [len(item.draft.token_ids) for item in items]
    is_decode = output.num_rows == len(items) + sum(num_drafted)  # one row of known tokens each
    if is_decode and (rows := decode_rows(items, workers, requests)) is not None:
        return _decode_batch(rows, workers, block_size, device)
    firsts = np.cumsum([0, *(1 + num for num in num_drafted)])  # of each item's parts: its known tokens, its draft's
    num_rows, starts = np.ones(firsts[-1], np.int32), np.empty(firsts[-1], np.int32)
    for item, first, num in zip(items, firsts.tolist(), num_drafted, strict=False):  # firsts has one more, the end
        num_rows[first], starts[first] = item.num_tokens, item.start
        starts[first + 1 : first + 1 + num] = np.arange(num) + item.start + item.num_tokens
    query_start = np.zeros(len(num_rows) + 1, np.int32)
    np.cumsum(num_rows, out=query_start[1:])
    context_lens = starts + num_rows
    owner = np.repeat(np.arange(len(num_rows)), num_rows)
    positions = np.arange(query_start[-1], dtype=np.int64) - query_start[owner] + starts[owner]
    tables = workers.block_tables.gather([item.id for item in items for _ in range(1 + len(item.draft.token_ids))])
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    wanted = _WantedRows()
    for item, first_row in zip(items, query_start[firsts[:-1]].tolist(), strict=True):
        wanted.add(item, workers.sequence(item.id), requests[item.id], first_row)
    to: dict[str, Any] = {"device": device, "non_blocking": True}
    return Batch(
        token_ids=torch.tensor(wanted.token_ids).to(**to),
        positions=torch.from_numpy(positions).to(**to),
        slots=torch.from_numpy(slots).to(**to),
        paged=PagedStep(
            block_tables=torch.from_numpy(tables).to(**to),
            query_start=torch.from_numpy(query_start).to(**to),
            context_lens=torch.from_numpy(context_lens).to(**to),
        ),
        logit_rows=torch.tensor(wanted.logit_rows, dtype=torch.int64).to(**to),
        sampled=tuple(wanted.sampled),
        prompts=tuple(wanted.prompts),
        jumps=tuple(wanted.jumps),
        allowed=tuple(wanted.allowed) if any(mask is not None for mask in wanted.allowed) else (),
        states=None if (states := state_slots(items)) is None else torch.from_numpy(states).to(**to),
        images=image_rows(items, requests, positions, query_start[firsts], device),
    )


@dataclass
class _WantedRows:
    """The token ids of a batch, and its rows whose logits are read. Filled sequence by sequence, in their order."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[SampledRow] = field(default_factory=list)
    allowed: list[bytes | None] = field(default_factory=list)  # of each sampled one
    prompts: list[KnownRows] = field(default_factory=list)
    jumps: list[KnownRows] = field(default_factory=list)
    _sampled_rows: list[int] = field(default_factory=list)
    _prompt_rows: list[int] = field(default_factory=list)
    _jump_rows: list[int] = field(default_factory=list)

    @property
    def logit_rows(self) -> list[int]:
        """Rows that are sampled, rows that score prompt tokens, rows that score a jump's tokens."""
        return self._sampled_rows + self._prompt_rows + self._jump_rows

    def add(self, item: ScheduledSequence, sequence: Sequence, request: Request, first_row: int) -> None:
        """Append the rows of one sequence, the first of which is row `first_row` of the batch."""
        end, end_row = item.start + item.num_tokens, first_row + item.num_tokens
        self.token_ids += sequence.token_ids[item.start : end]
        self.token_ids += item.draft.token_ids
        if end == sequence.num_tokens:
            rows = sampled_rows(item, request)
            self.sampled += rows
            self._sampled_rows += range(end_row - 1, end_row - 1 + len(rows))
            self.allowed += masks_of(item)
        if request.wants_prompt_logprobs and item.start < request.sequence.num_prompt_tokens:
            first = request.options.logprob_start_len + len(request.record.prompt_logprobs)
            tokens = _tokens_after(item, first, request.sequence.num_prompt_tokens)
            self._prompt_rows += self._score(self.prompts, request, sequence, tokens, first_row - item.start)
        if sequence.jump_start is not None:
            tokens = _tokens_after(item, sequence.jump_start, sequence.num_tokens)
            self._jump_rows += self._score(self.jumps, request, sequence, tokens, first_row - item.start)

    def _score(
        self, known: list[KnownRows], request: Request, sequence: Sequence, tokens: range, offset: int
    ) -> Iterable[int]:
        """Note these tokens of a sequence, by index, as scored ones. Returns the rows before them; offset: the batch's
        row of the sequence's first token."""
        if len(tokens):
            known.append(KnownRows(request, sequence.token_ids[tokens.start : tokens.stop]))
        return range(tokens.start - 1 + offset, tokens.stop - 1 + offset)


def sampled_rows(item: ScheduledSequence, request: Request) -> list[SampledRow]:
    """Return the rows of a share that are drawn from: its last known token's, and its draft's."""
    drafted = item.draft.token_ids
    return [SampledRow(request, drafted[:num]) for num in range(len(drafted) + 1)]


def masks_of(item: ScheduledSequence) -> tuple[bytes | None, ...]:
    """Return the tokens that a grammar allows in each of the rows of a share that are drawn from."""
    draft = item.draft
    return (item.allowed, *(draft.allowed or (None,) * len(draft.token_ids)))


class StepRows(NamedTuple):
    """The rows of a decode step before they become tensors."""

    ids: list[str]
    token_ids: list[int]
    positions: list[int]
    sampled: tuple[SampledRow, ...]
    allowed: tuple[bytes | None, ...]
    states: np.ndarray | None
    offsets: list[int] | None  # of the rotary positions, behind images; None: there are none


def decode_rows(
    items: tuple[ScheduledSequence, ...], workers: WorkerSequenceManager, requests: Mapping[str, Request]
) -> StepRows | None:
    """Return the rows of a step that samples after the last known token of each sequence, and after its draft's; None
    for any other step, as one whose last known token is of an image."""
    ids: list[str] = []
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[SampledRow] = []
    allowed: list[bytes | None] = []
    offsets: list[int] = []
    for item in items:
        id, _, start, _, _, _, _, _, mask, _, draft, _ = item
        tokens, request = workers.sequence(id).token_ids, requests[id]
        if start != len(tokens) - 1 or request.wants_prompt_logprobs:
            return None
        if request.images is not None and request.images.tokens[-1] == start:
            return None
        offsets += [request.rotary_offset] * (1 + len(draft.token_ids))
        ids.append(id)
        token_ids.append(tokens[start])
        positions.append(start)
        sampled.append(SampledRow(request))
        allowed.append(mask)
        if (num := len(draft.token_ids)) > 0:
            ids += [id] * num
            token_ids += draft.token_ids
            positions += range(start + 1, start + 1 + num)
            sampled += sampled_rows(item, request)[1:]
            allowed += masks_of(item)[1:]
    masks = tuple(allowed) if allowed.count(None) < len(allowed) else ()
    return StepRows(
        ids, token_ids, positions, tuple(sampled), masks, state_slots(items), offsets if any(offsets) else None
    )


def _decode_batch(rows: StepRows, workers: WorkerSequenceManager, block_size: int, device: torch.device) -> Batch:
    num_rows = len(rows.ids)
    positions = np.array(rows.positions, np.int64)
    tables = workers.block_tables.gather(rows.ids)
    steps = np.arange(num_rows + 1)
    blocks, offsets = np.divmod(positions, block_size)
    slots = tables[steps[:-1], blocks] * np.int64(block_size) + offsets
    to: dict[str, Any] = {"device": device, "non_blocking": True}
    return Batch(
        token_ids=torch.tensor(rows.token_ids).to(**to),
        positions=torch.from_numpy(positions).to(**to),
        slots=torch.from_numpy(slots).to(**to),
        paged=PagedStep(
            block_tables=torch.from_numpy(tables).to(**to),
            query_start=torch.from_numpy(steps.astype(np.int32)).to(**to),
            context_lens=torch.from_numpy((positions + 1).astype(np.int32)).to(**to),
        ),
        logit_rows=torch.from_numpy(steps[:-1]).to(**to),
        sampled=rows.sampled,
        prompts=(),
        allowed=rows.allowed,
        is_decode=True,
        states=None if rows.states is None else torch.from_numpy(rows.states).to(**to),
        images=None if rows.offsets is None else moved_rows(positions, rows.offsets, device),
    )


def state_slots(items: tuple[ScheduledSequence, ...]) -> np.ndarray | None:
    """Return the slots of recurrent states that each part of the step reads and writes, int64 [2, S]; None without
    them. The row of a drafted token is a part of its own: it reads what the row before has written."""
    slots = []
    for item in items:
        if item.states is not None:
            written = (item.states.write, *item.draft.states)
            slots += [item.states, *itertools.pairwise(written)]
    return np.array(slots, np.int64).T.copy() if slots else None


def _tokens_after(item: ScheduledSequence, first: int, end: int) -> range:
    """Return the tokens from number `first` to `end` - 1 that follow this item's rows, by index; empty without any."""
    first = max(first, item.start + 1)
    return range(first, max(min(item.start + item.num_tokens + 1, end), first))
