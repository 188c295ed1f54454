"""Decode steps of fixed sizes, each recorded once and replayed: a CUDA graph on a GPU, the kernels' calls on a CPU.

A step of n rows runs at the smallest size of a ladder that holds it, over input buffers that are the same memory in
every step. Padding rows repeat the row with the shortest context: they write the same bytes to its slot, so they need
no block of their own and change nothing.

A record is valid while weights and KV do not move. A commit updates weights in place and keeps the records; memory
that was released and allocated again drops them. Drawn tokens stay on the device and can be the next step's inputs, so
that step can enter the queue before the host has read them; the host waits for an event when it needs the results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention.paged import PagedStep, attention_path
from ...kernels.machine.tensor_addresses import TensorAddresses
from ...kernels.sampling.draws import RowSettings, draw_tokens
from ..kv.tensors import KVCache
from ..model.hosted_model import HostedModel
from ..model.steps.context import StepContext
from ..states.tensors import StatePool
from .cpu_graphs import CPUGraphs
from .decode_buffers import Buffers, DecodedStep, DecodeInputs, DecodeRows, Drawn, HostViews, Staging
from .recorders import CUDAGraphs, PlainWhileHooked, Recorder, Run

_NUM_STAGINGS = 2  # steps that may be in the queue
_LADDER = (1, 2, 4, *range(8, 257, 8))
# Finer: padding rows cost time.
_CPU_LADDER = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 129, 8), *range(144, 257, 16))


def decode_ladder(asked: Sequence[int] | None, max_num_seqs: int, device: torch.device) -> tuple[int, ...]:
    """Return the sizes to record, ascending: `asked`, or a ladder up to `max_num_seqs` or the last useful size."""
    if asked is not None:
        return tuple(sorted({min(size, max_num_seqs) for size in asked}))
    ladder = _LADDER if device.type == "cuda" else _CPU_LADDER
    largest = min(max_num_seqs, ladder[-1])
    return (*(size for size in ladder if size < largest), largest)


def why_not_recorded(model: HostedModel) -> str | None:
    """Return the reason why the model's decode steps cannot be recorded, or None if they can."""
    guarantee = model.numerics.guarantee
    path = guarantee.attention if guarantee else attention_path(model.device, model.dtype)
    wrong = []
    if path == "torch":
        remedy = ": install Triton" if model.device.type == "cuda" else ""
        wrong.append(f"its attention, in PyTorch, reads lengths on the host{remedy}")
    # Without invariant mode, experts are transformers' own, in products that can be recorded; tp ranks need ours.
    is_ours = guarantee is not None or model.mesh.tp > 1 or model.device.type == "cuda"
    if model.module._can_set_experts_implementation() and is_ours and not model.numerics.groups_experts:
        wrong.append("its experts read on the host which of them are chosen")
    rope = getattr(model.config, "rope_parameters", None) or {}
    if any(p.get("rope_type") in ("dynamic", "longrope") for p in (rope, *rope.values()) if isinstance(p, dict)):
        wrong.append("its rotary tables depend on the longest sequence, which the host looks for")
    return "; ".join(wrong) or None


def _recorder_for(model: HostedModel) -> Recorder:
    if model.device.type == "cuda":
        return PlainWhileHooked(CUDAGraphs(model.device), model.module)
    return CPUGraphs(model.module)


def padded_rows(inputs: DecodeInputs, size: int) -> np.ndarray:
    """Return the rows of a step that is padded to `size`, int64 [size]."""
    num_rows = len(inputs.positions)
    rows = np.full(size, inputs.positions.argmin())
    rows[:num_rows] = np.arange(num_rows)
    return rows


class DecodeGraphs:
    """Decode steps at the sizes of a ladder. One thread at a time; in inference mode."""

    def __init__(
        self,
        model: HostedModel,
        kv_cache: KVCache,
        state_pool: StatePool,
        sizes: Sequence[int],
        width: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Allocate the buffers; records nothing yet.

        sizes: ascending, at least one; width: blocks of the longest table.
        """
        self._model, self._kv_cache, self._state_pool, self.sizes = model, kv_cache, state_pool, tuple(sizes)
        device = model.device
        self._recorder = recorder or _recorder_for(model)
        self._buffers = Buffers.make(self.sizes[-1], width, device)
        self._stagings = [Staging.make(self.sizes[-1], width, device.type == "cuda") for _ in range(_NUM_STAGINGS)]
        self._tables = np.zeros((self.sizes[-1], width), np.int32)  # a copy of the device's tables
        self._settings: RowSettings | None = None  # the device's settings, for this many rows:
        self._settings_size = 0
        self._records: dict[tuple[int, str], Run] = {}  # by size and kind
        self._repeated: tuple[int, ...] = ()  # what the records repeat, beside
        self._weights = TensorAddresses(())  # the module's tensors, which they read
        self._views = HostViews(self._buffers) if device.type == "cpu" else None
        self._versions = [0] * self.sizes[-1]  # of the tables in the views, by row; 0: of none
        self._padding = 0  # the row that pads the newest step of `run_rows`
        self._num_steps = 0
        self.num_tables_sent = 0  # rows of block tables that had changed

    def size_for(self, num_rows: int) -> int | None:
        """Return the smallest size that holds `num_rows` rows; None beyond the ladder."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else None

    @property
    def unrecorded(self) -> list[int]:
        """Return the sizes that have no record yet, the largest first: smaller ones then fit into its memory."""
        return [size for size in reversed(self.sizes) if (size, "") not in self._records]

    def record_ahead(self, size: int, block: int) -> None:
        """Record a size before a step needs it. No step is in flight; its rows write to this block, which nothing
        reads. Does nothing for a model with states, whose slots have owners."""
        if self._state_pool.is_used or (size, "") in self._records:
            return
        self._forget_if_moved()
        b = self._buffers
        self._tables[:size], self._settings = 0, None
        self._versions[:size] = [0] * size
        for buffer in (b.token_ids, b.positions, b.noise_positions, b.block_tables):
            buffer[:size].zero_()
        b.block_tables[:size, 0] = self._tables[:size, 0] = block
        b.slots[:size] = block * self._kv_cache.block_size
        b.context_lens[:size] = 1
        b.settings.top_k.fill_(1)
        self._record_of(size, "", self._drawing_step)

    def forget(self) -> None:
        """Drop all records and the memory that they hold."""
        self._records.clear()

    def run(self, inputs: DecodeInputs) -> DecodedStep:
        """Put a step in the device's queue; returns at once on a GPU. Its rows fit the ladder."""
        num_rows = len(inputs.positions)
        results, staging = self._run(inputs, "", self._drawing_step)
        buffers, logits = self._buffers, results[0][:num_rows]
        staging.drawn_ids[:num_rows].copy_(buffers.drawn_ids[:num_rows], non_blocking=True)
        staging.drawn_logprobs[:num_rows].copy_(buffers.drawn_logprobs[:num_rows], non_blocking=True)
        if staging.done is not None:
            staging.done.record()
        return DecodedStep(num_rows, logits, staging)

    def _run(self, inputs: DecodeInputs, kind: str, step: Callable[[int], Run]) -> tuple[Sequence[Tensor], Staging]:
        """Run a step of a kind; returns its results, which the next step may overwrite, and the inputs' staging.

        step: makes the function to record, by its size.
        """
        size = self.size_for(len(inputs.positions))
        assert size is not None, len(inputs.positions)
        self._forget_if_moved()
        staging = self._stagings[self._num_steps % _NUM_STAGINGS]
        self._num_steps += 1
        staging.wait()  # its step may still run if its results were never read
        self._fill(inputs, size, staging)
        return self._record_of(size, kind, step)(), staging

    def run_rows(self, rows: DecodeRows, size: int) -> Drawn:
        """Run a step on a CPU, and return its tokens and their log-probabilities. size: `size_for` its rows."""
        num_rows, views = len(rows.positions), self._views
        assert views is not None, num_rows
        self._forget_if_moved()
        self._num_steps += 1
        self._fill_views(rows, size, views)
        self._record_of(size, "", self._drawing_step)()
        return views.drawn(num_rows)

    def run_further(self, num_rows: int, size: int) -> Drawn:
        """Run the step that follows the newest one, which was of the same rows on a CPU, with the tokens that it has
        drawn. Returns as `run_rows`. The rows' tables hold blocks for it."""
        views = self._views
        assert views is not None, num_rows
        self._forget_if_moved()
        self._num_steps += 1
        views.advance(num_rows, size, self._kv_cache.block_size, self._padding)
        self._record_of(size, "", self._drawing_step)()
        return views.drawn(num_rows)

    def _record_of(self, size: int, kind: str, step: Callable[[int], Run]) -> Run:
        record = self._records.get((size, kind))
        if record is None:
            record = self._records[size, kind] = self._recorder.record(step(size))
        return record

    def _forget_if_moved(self) -> None:
        """Drop all records if memory has moved. Looks at every address before each step: a record that reads memory
        which was replaced and freed ends the process."""
        # The number of threads, the version of the module's code, which KV there is, and the pool of states.
        states = map(Tensor.data_ptr, self._state_pool.all()) if self._state_pool.tensors else ()
        repeated = torch.get_num_threads(), self._model.phase.code_version, self._kv_cache.num_releases, *states
        if not self._records or repeated != self._repeated or not self._weights.are_same():
            self.forget()
            modules = self._model.module.modules()  # the layers may be others since: adapters
            self._weights = TensorAddresses([own for m in modules for own in (m._parameters, m._buffers)])
            self._repeated = repeated

    def _forward(self, size: int, hidden: Tensor | None = None, *, whole_logits: bool = True) -> Callable[[], Tensor]:
        """Return the model's forward over the buffers. The arguments are `HostedModel.forward`'s."""
        b = self._buffers
        paged = PagedStep(b.block_tables[:size], b.query_start[: size + 1], b.context_lens[:size])
        token_ids, positions = b.token_ids[:size], b.positions[:size]

        def run() -> Tensor:
            states = self._state_pool.step(b.states[:, :size] if self._state_pool.is_used else None)
            kv = self._kv_cache
            context = StepContext(b.slots[:size], paged, kv.keys, kv.values, states=states, index_caches=kv.index_keys)
            return self._model.forward(token_ids, positions, None, context, hidden, whole_logits=whole_logits)

        return run

    def _drawing_step(self, size: int) -> Run:
        """Return the step in the buffers: its logits [size, V], drawn tokens and log-probabilities."""
        b, forward = self._buffers, self._forward(size)

        def run() -> Sequence[Tensor]:
            logits = forward()
            drawn = draw_tokens(logits, b.first_settings(size), b.noise_positions[:size])
            b.drawn_ids[:size].copy_(drawn.token_ids)
            b.drawn_logprobs[:size].copy_(drawn.logprobs)
            return logits, b.drawn_ids[:size], b.drawn_logprobs[:size]

        return run

    def _fill(self, inputs: DecodeInputs, size: int, staging: Staging) -> None:
        """Copy the inputs to the buffers, padded to `size`. Of the tables, only changed rows are copied."""
        b, rows = self._buffers, padded_rows(inputs, size)
        numbers = staging.numbers.numpy()
        positions = inputs.positions[rows]
        rotary = positions if inputs.rotary is None else inputs.rotary[rows]
        numbers[0, :size], numbers[1, :size] = inputs.token_ids[rows], rotary
        numbers[2, :size], numbers[3, :size] = positions + 1, inputs.slots[rows]
        staging.context_lens.numpy()[:size] = positions + 1
        pairs = [(b.token_ids, 0), (b.positions, 1), (b.noise_positions, 2), (b.slots, 3)]
        if inputs.sources is not None:
            numbers[4, :size] = inputs.sources[rows]
            pairs = [*pairs[1:], (b.sources, 4)]
        if inputs.states is not None:
            numbers[5:, :size] = inputs.states[:, rows]
            pairs += [(b.states[0], 5), (b.states[1], 6)]
        for buffer, index in pairs:
            buffer[:size].copy_(staging.numbers[index, :size], non_blocking=True)
        b.context_lens[:size].copy_(staging.context_lens[:size], non_blocking=True)
        if inputs.sources is not None:
            torch.index_select(b.drawn_ids, 0, b.sources[:size], out=b.token_ids[:size])
        self._fill_tables(inputs.block_tables[rows], staging)
        self._fill_settings(inputs.settings, rows)

    def _fill_views(self, rows: DecodeRows, size: int, views: HostViews) -> None:
        """Write the inputs to the buffers, padded to `size`. Of the tables, only changed rows are written."""
        token_ids, positions, tables, block_size = (
            rows.token_ids,
            rows.positions,
            rows.tables,
            self._kv_cache.block_size,
        )
        num_rows, versions = len(positions), self._versions
        padding = self._padding = positions.index(min(positions)) if size > num_rows else 0
        for row in range(size):
            source = row if row < num_rows else padding
            position, own = positions[source], tables[source]
            views.token_ids[row], views.positions[row] = token_ids[source], position
            views.noise_positions[row] = views.context_lens[row] = position + 1
            block, offset = divmod(position, block_size)
            views.slots[row] = own.blocks[block] * block_size + offset
            if versions[row] != own.version:
                versions[row] = own.version
                self.num_tables_sent += 1
                views.block_tables[row, : len(own.blocks)] = own.blocks
                self._tables[row] = views.block_tables[row]
        settings = rows.settings
        if settings is not self._settings or size != self._settings_size:
            sources = [*range(num_rows), *[padding] * (size - num_rows)]
            self._fill_settings(settings, np.array(sources))

    def _fill_tables(self, tables: np.ndarray, staging: Staging) -> None:
        """Copy the rows of the tables that have changed; neighbours at once, for drafts move all rows behind them."""
        size, width = tables.shape
        changed = np.flatnonzero((self._tables[:size, :width] != tables).any(1))
        self.num_tables_sent += len(changed)
        staged = staging.block_tables.numpy()
        for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1) if len(changed) else ():
            rows = slice(int(run[0]), int(run[-1]) + 1)
            self._versions[rows] = [0] * len(run)
            staged[rows, :width] = tables[rows]
            self._tables[rows] = staged[rows]  # whole rows lie side by side: one copy
            self._buffers.block_tables[rows].copy_(staging.block_tables[rows], non_blocking=True)

    def _fill_settings(self, settings: RowSettings | None, rows: np.ndarray) -> None:
        """Copy the settings if the batch has changed: a sampler returns the same object for the same batch.

        Where the host draws, from logits of its own, the record's draws are not read: they take the cheapest settings.
        """
        if settings is None:
            if self._settings is not None:
                self._buffers.settings.top_k.fill_(1)  # the largest logit: no filter, no noise
            self._settings = None
            return
        if settings is self._settings and len(rows) == self._settings_size:
            return
        self._settings, self._settings_size = settings, len(rows)
        index, ours = torch.from_numpy(rows), self._buffers.settings
        for name in ("temperatures", "seeds", "top_k", "top_p", "min_p"):
            getattr(ours, name)[: len(rows)].copy_(getattr(settings, name)[index], non_blocking=True)
