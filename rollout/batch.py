"""The tensors of one step, from what the scheduler decided and what the worker manager knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import PagedStep
from .request import Request
from .schedule import ScheduledSequence, ScheduleOutput
from .sequence_manager import WorkerSequenceManager


@dataclass(frozen=True)
class KnownRows:
    """Rows whose logits give log-probabilities of tokens that one sequence has already."""

    request: Request
    first_token: int  # position of the first token that they are about
    num_rows: int


@dataclass(frozen=True)
class Batch:
    """One step as tensors. Rows stand sequence by sequence, in the order of the schedule."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]: where each row's KV goes
    paged: PagedStep
    logit_rows: Tensor  # int64: rows whose logits are needed: those sampled from, then the prompts', then the jumps'
    sampled: tuple[Request, ...]  # one per sampled row
    prompts: tuple[KnownRows, ...]
    jumps: tuple[KnownRows, ...] = ()  # of tokens that were not sampled
    allowed: tuple[bytes | None, ...] = ()  # per sampled row: what a grammar allows; empty: nobody has one


def build_batch(
    output: ScheduleOutput,
    workers: WorkerSequenceManager,
    requests: Mapping[str, Request],
    block_size: int,
    device: torch.device,
) -> Batch:
    """Lay out the scheduled rows. Changes nothing."""
    items = output.scheduled
    num_rows = np.fromiter((item.num_tokens for item in items), np.int32, len(items))
    query_start = np.zeros(len(items) + 1, np.int32)
    np.cumsum(num_rows, out=query_start[1:])
    starts = np.fromiter((item.start for item in items), np.int32, len(items))
    context_lens = starts + num_rows
    owner = np.repeat(np.arange(len(items)), num_rows)
    positions = np.arange(query_start[-1], dtype=np.int64) - query_start[owner] + starts[owner]
    tables = _block_tables(items, workers)
    slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    token_ids: list[int] = []
    sampled, sampled_rows, prompts, prompt_rows, jumps, jump_rows = [], [], [], [], [], []
    allowed: list[bytes | None] = []
    for index, item in enumerate(items):
        sequence, request = workers.sequence(item.id), requests[item.id]
        end = item.start + item.num_tokens
        if item.num_tokens == 1:
            token_ids.append(sequence.token_ids[item.start])
        else:
            token_ids += sequence.token_ids[item.start : end]
        if end == sequence.num_tokens:
            sampled.append(request)
            sampled_rows.append(query_start[index + 1] - 1)
            allowed.append(item.allowed)
        if request.wants_prompt_logprobs and item.start < request.sequence.num_prompt_tokens:
            rows = _prompt_rows(request, item, query_start[index])
            if len(rows):
                prompts.append(KnownRows(request, int(positions[rows[0]]) + 1, len(rows)))
                prompt_rows += rows
        if item.jump:
            num_jumped, end_row = len(item.jump.token_ids), int(query_start[index + 1]) - 1
            jumps.append(KnownRows(request, sequence.num_tokens - num_jumped, num_jumped))
            jump_rows += range(end_row - num_jumped, end_row)
    to = {"device": device, "non_blocking": True}
    return Batch(
        token_ids=torch.tensor(token_ids).to(**to),
        positions=torch.from_numpy(positions).to(**to),
        slots=torch.from_numpy(slots).to(**to),
        paged=PagedStep(
            block_tables=torch.from_numpy(tables).to(**to),
            query_start=torch.from_numpy(query_start).to(**to),
            context_lens=torch.from_numpy(context_lens).to(**to),
        ),
        logit_rows=torch.tensor(sampled_rows + prompt_rows + jump_rows, dtype=torch.int64).to(**to),
        sampled=tuple(sampled),
        prompts=tuple(prompts),
        jumps=tuple(jumps),
        allowed=tuple(allowed) if any(mask is not None for mask in allowed) else (),
    )


def _block_tables(items: tuple[ScheduledSequence, ...], workers: WorkerSequenceManager) -> np.ndarray:
    """int32 [S, longest table]; entries behind a table's end are 0 and never read."""
    tables = [workers.block_table(item.id) for item in items]
    out = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def _prompt_rows(request: Request, item: ScheduledSequence, first_row: int) -> range:
    """Rows of this item whose logits are about prompt tokens that are asked for and not yet recorded."""
    first_token = max(request.options.logprob_start_len + len(request.prompt_logprobs), item.start + 1)
    last_token = min(item.start + item.num_tokens, request.sequence.num_prompt_tokens - 1)
    start = int(first_row) + first_token - 1 - item.start
    return range(start, start + max(last_token - first_token + 1, 0))
