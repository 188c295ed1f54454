"""The forwards of a proof: known tokens in large prefills, with a draw behind each token that a sample claims.

A draw's noise follows from (seed, position, token id) and its logits from the tokens before it, so a token that was
drawn is drawn again, whatever ran beside it. Letters: N rows of a forward, R rows that are drawn from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.paged import PagedStep
from ...kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens
from ..control.driver import Driver
from ..kv.tensors import KVCache, KVPlan, bytes_per_token, usable_bytes
from ..loop.parts import Parts
from ..model.steps.context import KVWritten, StepContext
from .claim import Drawn, Verdict, unproven
from .head import HeadInParts
from .layout import Batch, Rows, Task, batches, forwards, plan
from .own_settings import OwnSettings, needs_own

MOST_ROWS = 4096  # of a forward
LOGITS_BYTES = 32 << 20  # of logits at a time, in float32: a product that stays in a cache is faster
LEAST_LOGITS = 256  # rows of logits at a time, whatever the vocabulary: each time all weights of the head are read
KV_BYTES = 1 << 30  # of the KV of samples that are proven together
BLOCK_SIZE = 16

Switch = Callable[[str], None]  # makes the weights of a digest the engine's, or raises NoWeights


class NoWeights(ValueError):
    """Weights that cannot be made the engine's after all. The message says why, of one sample."""


class Prover:
    """Prove samples with an engine's model, between its steps, over KV of its own."""

    def __init__(self, parts: Parts, driver: Driver, *, most_rows: int = MOST_ROWS) -> None:
        """Allocate nothing. Raises ValueError for a model that one rank does not have whole, or that is recurrent."""
        if parts.ranks.mesh.num_ranks > 1 or parts.model.has_states:
            raise ValueError("prefills with draws need the whole model on one rank, without recurrent layers")
        self._parts, self._driver, self._model = parts, driver, parts.model
        self._most_rows = most_rows
        self._most_drawn = max(LOGITS_BYTES // (4 * parts.model.vocab_size), LEAST_LOGITS)  # rows at a time
        self._head = HeadInParts(parts.model)
        self._has_parts: bool | None = None  # None until it was tried
        shapes = parts.model.kv_shapes
        self.last_layer = max(layer for layer, shape in enumerate(shapes) if shape.num_kv_heads)
        self._bytes_per_block = BLOCK_SIZE * bytes_per_token(shapes)

    def prove(
        self, tasks: Sequence[Task], switch: Switch, on_proven: Callable[[int], object] = lambda num: None
    ) -> list[Verdict]:
        """Draw every span again, and return a verdict on each, in order.

        switch: makes the weights of a digest resident; called before the forwards that need them, with no step in
        flight elsewhere. Where it raises NoWeights, the spans that need them are unproven. on_proven: called with
        numbers of spans that are done. Spans of several weights that run partly under each are proven with each of
        them in turn.
        """
        limit = max(min(KV_BYTES, usable_bytes(self._model.device)) // self._bytes_per_block, 1)
        found = batches(tasks, BLOCK_SIZE, limit)
        most = max((batch.num_blocks for batch in found), default=0)
        if not most:
            return []
        proof = _Proof(self, most)
        for batch in found:
            try:
                proof.run(batch, switch)
            except NoWeights as error:
                proof.without_weights |= {task: str(error) for group in batch.groups for task in group}
            on_proven(sum(map(len, batch.groups)))
        return [proof.verdict(task) for task in tasks]

    def cache(self, num_blocks: int) -> KVCache:
        """Allocate KV for so many blocks."""
        size = KVPlan(num_blocks, self._bytes_per_block, "to prove samples")
        return KVCache(size, self._model.kv_shapes, BLOCK_SIZE, self._model.device)

    def forwards(self, rows: Sequence[Rows]) -> Any:
        """Divide rows into forwards of the resident weights."""
        if self._has_parts is None:
            self._call(self._try_parts)
        return forwards(rows, self._most_rows, self._most_rows if self._has_parts else self._most_drawn)

    def run(self, digest: str, forward: Callable[[], None]) -> None:
        """Run a forward between two steps. Raises ValueError where the weights have changed meanwhile."""

        def checked() -> None:
            if (now := self._parts.sequences.weight_digest) != digest:
                raise ValueError(f"the weights changed during the proof: {digest} was wanted, {now} is there")
            self._parts.runner.call(forward)

        self._call(checked)

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, context: StepContext) -> Iterator[Tensor]:
        """Run the model, and yield the logits [?, V] of these rows [R], some after the others."""
        if self._has_parts:
            yield from self._head.logits(ids, positions, rows, context, self._most_drawn)
        else:
            yield self._model.forward(ids, positions, rows, context)

    def write(self, ids: Tensor, positions: Tensor, context: StepContext) -> None:
        """Run the model up to the KV of its last attention."""
        with suppress(KVWritten):
            self._model.forward(ids, positions, positions[:1], context)
            raise AssertionError("the last attention was not called")

    def _call(self, function: Callable[[], None]) -> None:
        with self._model.rollout_phase():
            self._driver.command("prove", function)

    def _try_parts(self) -> None:
        def run() -> None:
            self._has_parts = self._head.is_recognised()

        self._parts.runner.call(run)

    @property
    def parts(self) -> Parts:
        return self._parts


class _Proof:
    """One call: its KV, and what came out of each task."""

    def __init__(self, prover: Prover, most_blocks: int) -> None:
        self._prover, self._cache = prover, prover.cache(most_blocks)
        self._own = OwnSettings(prover.parts)
        self._wrong: dict[Task, tuple[int, int, float]] = {}  # first position that differs, and what came out
        self._settings: dict[Task, tuple[Any, ...]] = {}
        self.without_weights: dict[Task, str] = {}  # which cannot be drawn, and why

    def run(self, batch: Batch, switch: Switch) -> None:
        """Draw a batch's samples again."""
        layout = plan(batch, BLOCK_SIZE)
        for phase in layout.phases:
            digest = batch.weights[phase.weights]
            switch(digest)
            if phase.is_drawn and layout.copies.size:
                self._copy(layout.copies)
            forward = self._forward if phase.is_drawn else self._write
            for step in self._prover.forwards(phase.rows):
                self._own.prepare(part.task for part in step if part.num_drawn)
                self._prover.run(digest, partial(forward, step))

    def verdict(self, task: Task) -> Verdict:
        """Return what came out of a task."""
        claim, span = task.claim, task.span
        if task in self.without_weights:
            return unproven(self.without_weights[task])
        if task in self._own.too_slow:
            return unproven("its grammar took too long here: it is too ambiguous")
        if (wrong := self._wrong.get(task)) is None:
            num_tokens = span.end - span.start
            if task in self._own.open and span.end == len(claim.token_ids):
                return Verdict("differs", "end", span.end - 1, num_tokens=num_tokens)
            return Verdict("equal", num_tokens=num_tokens)
        position, token_id, logprob = wrong
        bits = claim.logprob_bits[position : position + 1]
        claimed = Drawn(int(claim.token_ids[position]), float(bits.view(np.float32)[0]), int(bits[0]))
        came = Drawn(token_id, logprob, int(np.array([logprob], np.float32).view(np.uint32)[0]))
        what = "token" if claimed.token_id != came.token_id else "logprob"
        return Verdict("differs", what, position, claimed, came, position - span.start)

    def _copy(self, copies: np.ndarray) -> None:
        of, to = torch.from_numpy(copies).to(self._prover.parts.model.device)
        for cache in self._cache.tensors:
            cache[to] = cache[of]

    @torch.inference_mode()
    def _write(self, step: Sequence[Rows]) -> None:
        """Run rows for their KV alone: the forward ends with that of the last layer."""
        ids, positions, context = self._inputs(step, self._prover.last_layer)
        self._prover.write(ids, positions, context)

    @torch.inference_mode()
    def _forward(self, step: Sequence[Rows]) -> None:
        """Run rows, and compare the tokens that are drawn from them with the claimed ones."""
        ids, positions, context = self._inputs(step)
        draws, wanted = _draws(step)
        rows = torch.from_numpy(wanted if len(wanted) else np.zeros(1, np.int64)).to(ids.device)
        begin = 0
        for logits in self._prover.logits(ids, positions, rows, context):
            self._draw(_within(draws, begin, begin + len(logits)), logits)
            begin += len(logits)

    def _draw(self, draws: Sequence[_Draw], logits: Tensor) -> None:
        """Draw from logits [R, V], and compare with the claimed tokens."""
        plain = [draw for draw in draws if not needs_own(draw.task.claim)]
        if plain:
            self._compare(plain, *self._drawn(plain, logits))
        for draw in draws:
            if needs_own(draw.task.claim) and draw.task not in self._own.too_slow:
                self._compare([draw], *self._own.drawn(draw.task, draw.first, logits[draw.at : draw.at + draw.num]))

    def _inputs(self, step: Sequence[Rows], ends_at: int | None = None) -> tuple[Tensor, Tensor, StepContext]:
        """Return the token ids and positions of a forward's rows, and the places of their KV."""
        device = self._prover.parts.model.device
        ids, positions, slots, paged = _tensors(step)
        layout = PagedStep(*(tensor.to(device) for tensor in paged))
        caches = self._cache.keys, self._cache.values
        context = StepContext(slots.to(device), layout, *caches, ends_at=ends_at, index_caches=self._cache.index_keys)
        return ids.to(device), positions.to(device), context

    def _drawn(self, draws: Sequence[_Draw], logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Draw the tokens of samples whose settings one call takes; returns ids and log-probabilities [R]."""
        device = logits.device
        at = np.concatenate([np.arange(draw.at, draw.at + draw.num) for draw in draws])
        positions = np.concatenate([np.arange(draw.position, draw.position + draw.num) for draw in draws])
        nums = np.array([draw.num for draw in draws])
        columns = zip(*(self._settings_of(draw.task) for draw in draws), strict=True)
        dtypes = (torch.float32, torch.int64, torch.int64, torch.float64, torch.float32)
        repeats = torch.from_numpy(nums)
        given = [
            torch.tensor(column, dtype=dtype).repeat_interleave(repeats).to(device)
            for column, dtype in zip(columns, dtypes, strict=True)
        ]
        if len(at) != len(logits) or not np.array_equal(at, np.arange(len(at))):
            logits = logits[torch.from_numpy(at).to(device)]
        drawn = draw_tokens(logits, RowSettings(*given), torch.from_numpy(positions).to(device))
        return drawn.token_ids.cpu().numpy(), drawn.logprobs.cpu().numpy()

    def _settings_of(self, task: Task) -> tuple[Any, ...]:
        found = self._settings.get(task)
        if found is None:
            claim, params = task.claim, task.claim.params
            top_k = 1 if params.is_greedy else params.top_k if params.top_k > 0 else KEEP_ALL
            temperature = 1.0 if params.is_greedy else float(params.temperature)
            found = (temperature, claim.seed, min(top_k, KEEP_ALL), params.top_p, params.min_p)
            self._settings[task] = found
        return found

    def _compare(self, draws: Sequence[_Draw], token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Note the first position of each task that differs. token_ids, logprobs [R]: of the draws, in order."""
        claimed = np.concatenate([draw.task.claim.token_ids[draw.first : draw.first + draw.num] for draw in draws])
        bits = np.concatenate([draw.task.claim.logprob_bits[draw.first : draw.first + draw.num] for draw in draws])
        differs = (claimed != token_ids) | (bits != logprobs.view(np.uint32))
        if not differs.any():
            return
        ends = np.cumsum([draw.num for draw in draws])
        for draw, end in zip(draws, ends.tolist(), strict=True):
            found = np.flatnonzero(differs[end - draw.num : end])
            if len(found):
                row, position = end - draw.num + int(found[0]), draw.first + int(found[0])
                before = self._wrong.get(draw.task)
                if before is None or position < before[0]:
                    self._wrong[draw.task] = (position, int(token_ids[row]), float(logprobs[row]))


class _Draw:
    """Output tokens first .. first + num - 1 of a task, drawn from logits at .. at + num - 1 of a forward."""

    __slots__ = ("at", "first", "num", "task")

    def __init__(self, task: Task, first: int, num: int, at: int) -> None:
        self.task, self.first, self.num, self.at = task, first, num, at

    @property
    def position(self) -> int:
        """The position of the first of these tokens in its sequence."""
        return self.task.claim.num_prompt_tokens + self.first


def _within(draws: Sequence[_Draw], begin: int, end: int) -> list[_Draw]:
    """Return the draws, or parts of draws, from logits begin .. end-1, which are 0 .. end-begin-1 then."""
    found = []
    for draw in draws:
        first, last = max(draw.at, begin), min(draw.at + draw.num, end)
        if first < last:
            found.append(_Draw(draw.task, draw.first + first - draw.at, last - first, first - begin))
    return found


def _draws(step: Sequence[Rows]) -> tuple[list[_Draw], np.ndarray]:
    """Return the draws of a forward, and the rows int64 [R] whose logits they need."""
    draws: list[_Draw] = []
    wanted: list[np.ndarray] = []
    row = at = 0
    for part in step:
        if part.num_drawn:
            first = part.first_drawn + 1 - part.task.claim.num_prompt_tokens
            draws.append(_Draw(part.task, first, part.num_drawn, at))
            wanted.append(np.arange(row + part.first_drawn - part.first, row + part.end - part.first))
            at += part.num_drawn
        row += part.end - part.first
    return draws, np.concatenate(wanted) if wanted else np.zeros(0, np.int64)


def _tensors(step: Sequence[Rows]) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return token ids, positions and slots int64 [N], and the tables, offsets and lengths of a forward's sequences."""
    ends = np.array([part.end for part in step], np.int32)
    nums = ends - np.array([part.first for part in step], np.int32)
    query_start = np.zeros(len(step) + 1, np.int32)
    np.cumsum(nums, out=query_start[1:])
    tables = np.zeros((len(step), max(len(part.table) for part in step)), np.int32)
    for table, part in zip(tables, step, strict=True):
        table[: len(part.table)] = part.table
    owner = np.repeat(np.arange(len(step)), nums)
    positions = np.arange(query_start[-1], dtype=np.int64) - (query_start[1:] - ends)[owner]
    slots = tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = np.concatenate([_known(part.task, part.first, part.end) for part in step])
    paged = (torch.from_numpy(tables), torch.from_numpy(query_start), torch.from_numpy(ends))
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(slots), paged


def _known(task: Task, first: int, end: int) -> np.ndarray:
    """Return the tokens first .. end-1 of a task's sequence."""
    num, claim = task.claim.num_prompt_tokens, task.claim
    if first >= num:
        return claim.token_ids[first - num : end - num]
    prompt = np.array(claim.prompt_ids[first:end], np.int64)
    return prompt if end <= num else np.concatenate([prompt, claim.token_ids[: end - num]])
