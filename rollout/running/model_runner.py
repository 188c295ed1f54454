"""The runner of a rank that has the whole model: batch, forward, sampling."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ..kv.tensors import KVCache
from ..media.encoder import NO_FEATURES
from ..model.hosted_model import HostedModel
from ..model.steps.context import StepContext
from ..reports.trace import Trace
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from ..sequences.worker_manager import WorkerSequenceManager
from ..states.tensors import StatePool
from .batch import Batch, build_batch, decode_rows, state_slots
from .decode_buffers import DecodedStep, DecodeInputs, DecodeRows, Drawn
from .decode_graphs import DecodeGraphs
from .results import drawn_results, results_of, results_of_several
from .sampler import Sampler

Results = Callable[[], list[SequenceResult]]
T = TypeVar("T")


class ModelRunner:
    """The runner of one rank. It reads the worker manager's sequences and writes KV.

    With `overlap`, steps run beside the caller, one after another, and `launch` returns at once: they run on a thread
    of their own, or in the queue of a GPU that replays graphs. With graphs and `begins_ahead`, a decode step can begin
    before the last one is delivered (`anticipate`), since its input tokens are on the device.
    """

    num_stages = 1
    on_event = None

    def __init__(
        self,
        model: HostedModel,
        kv_cache: KVCache,
        state_pool: StatePool,
        sampler: Sampler,
        block_size: int,
        trace: Trace,
        *,
        overlap: bool,
        graphs: DecodeGraphs | None = None,
        begins_ahead: bool = False,
    ) -> None:
        self._model, self._kv_cache, self._sampler, self._block_size = model, kv_cache, sampler, block_size
        self._state_pool = state_pool
        self._trace, self._graphs, self._overlap = trace, graphs, overlap
        self.begins_ahead = begins_ahead and graphs is not None
        has_queue = graphs is not None and model.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "lockstep-model") if overlap and not has_queue else None
        self._runs_rows = graphs is not None and not overlap and model.device.type == "cpu"
        self.goes_on: Callable[[int], bool] = lambda num_steps: False
        self.workers = WorkerSequenceManager(self.num_stages)
        self.num_forwards = 0
        self.num_begun = 0  # steps that began before the step before was delivered
        self._newest: _Decode | None = None  # the newest step, if its tokens are in the graphs' buffers
        self._begun: _Decode | None = None  # a step that will probably be launched

    def launch(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> LaunchedStep:
        """Run the step, or give it to the thread or the GPU. Reads the managers here only, not while the step runs."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.holds(output):
            self._newest = begun
            return LaunchedStep(lambda: begun.results(output))
        if self._runs_rows and (launched := self._launch_rows(output, requests)) is not None:
            return launched
        # With graphs the batch stays on the host: it is copied with the graphs' inputs, or as a whole when it runs.
        on = torch.device("cpu") if self._graphs is not None else self._model.device
        batch = build_batch(output, self.workers, requests, self._block_size, on)
        self._newest = None
        if self._graphs is None or not batch.is_decode or self._graphs.size_for(len(batch.sampled)) is None:
            return LaunchedStep(self._start(output, lambda: self._run(output, batch)))
        settings = None if batch.allowed else self._sampler.settings_of([row.request for row in batch.sampled])
        inputs = DecodeInputs(
            batch.token_ids.numpy(), batch.positions.numpy(), batch.slots.numpy(), batch.paged.block_tables.numpy(),
            settings, states=None if batch.states is None else batch.states.numpy(),
            rotary=None if batch.images is None else batch.rotary_positions.numpy(),
        )  # fmt: skip
        if settings is None:  # the host takes part in sampling
            return LaunchedStep(self._start(output, lambda: self._decode_with_host(output, batch, inputs)))
        self._newest = step = self._decode(output, inputs)
        return LaunchedStep(lambda: step.results(output))

    def _launch_rows(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> LaunchedStep | None:
        """Run a decode step on a CPU whose rows go to the recorded step's buffers one by one, and the further ones of
        its schedule; returns None for any other step. A batch of tensors would take longer to make than all else around
        a step of few rows."""
        graphs, tables = self._graphs, self.workers.block_tables
        rows = decode_rows(output.scheduled, self.workers, requests)
        if rows is None or rows.allowed or rows.states is not None or rows.offsets is not None:
            return None
        assert graphs is not None
        if (size := graphs.size_for(len(rows.ids))) is None:
            return None
        settings = self._sampler.settings_of([row.request for row in rows.sampled])
        if settings is None:
            return None
        inputs = DecodeRows(rows.token_ids, rows.positions, [tables.own(id) for id in rows.ids], settings)
        self._newest = None
        run, drawn = partial(graphs.run_rows, inputs, size), list[Drawn]()
        with torch._C._InferenceMode(True):  # the guard of torch.inference_mode(), without its Python
            while not drawn or self._may_follow(output, drawn):
                self.num_forwards += 1
                with self._trace.span("forward", step=output.step, rows=len(rows.ids)):
                    drawn.append(run())
                run = partial(graphs.run_further, len(rows.ids), size)
        if len(drawn) > 1:
            return LaunchedStep(lambda: results_of_several(output.scheduled, drawn))
        return LaunchedStep(lambda: drawn_results(output.scheduled, *drawn[0]))

    def _may_follow(self, output: ScheduleOutput, drawn: Sequence[Drawn]) -> bool:
        """Return whether another decode step of the schedule follows those that have drawn this: none has ended a
        sequence or was broken, and nothing waits."""
        if len(drawn) >= output.num_steps:
            return False
        token_ids, logprobs = drawn[-1]
        is_broken = (total := sum(logprobs)) != total
        return not is_broken and output.stop_ids.isdisjoint(token_ids) and self.goes_on(len(drawn))

    def anticipate(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> None:
        """Begin the step that will probably be launched next, if its inputs are on the device already.

        The step in flight has not been delivered, and the managers do not know the new step yet. A sequence that ends
        in the step in flight wastes a row here: the row writes after the sequence's last token, into a block that no
        other sequence gets before a later step. A step that is never launched has changed nothing that is read again;
        call `settle` then.
        """
        newest, graphs = self._newest, self._graphs
        if not self.begins_ahead or newest is None or output.preempted or output.exhausted or output.ignored:
            return
        assert not newest.output.has_drafts, "the number of a drafted step's tokens is known after it"
        assert graphs is not None
        if graphs.size_for(len(output.scheduled)) is None or not output.scheduled:
            return
        sources = []
        for item in output.scheduled:
            source = newest.rows.get((item.id, item.incarnation))
            if source is None or item.num_tokens != 1 or item.start != self.workers.sequence(item.id).num_tokens:
                return
            sources.append(source)
        settings = self._sampler.settings_of([requests[item.id] for item in output.scheduled])
        if settings is None:
            return
        positions = np.array([item.start for item in output.scheduled], np.int64)
        moved = np.array([requests[item.id].rotary_offset for item in output.scheduled], np.int64)
        tables = self.workers.block_tables.gather_ahead([(item.id, item.new_blocks) for item in output.scheduled])
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = tables[np.arange(len(positions)), blocks] * np.int64(self._block_size) + offsets
        inputs = DecodeInputs(
            positions, positions, slots, tables, settings, np.array(sources, np.int64), state_slots(output.scheduled),
            positions + moved if moved.any() else None,
        )  # fmt: skip
        self.num_begun += 1
        self._begun = self._decode(output, inputs)

    def settle(self) -> None:
        """Cancel the step that `anticipate` began, if any. Returns when it no longer reads or writes KV."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._newest = None  # the buffers hold tokens of the cancelled step
            begun.settle()

    def release_memory(self) -> None:
        """Drop all records before KV or weights are released. No step is in flight."""
        self.settle()
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def unrecorded_sizes(self) -> list[int]:
        """Return the numbers of rows of decode steps that are not recorded yet, the largest first."""
        return self._graphs.unrecorded if self._graphs is not None else []

    def record_ahead(self, size: int, block: int) -> None:
        """Record the decode step of `size` rows, between two steps. block: a free one, to which its rows write."""
        assert self._graphs is not None, size
        self.settle()
        self._newest = None
        self.call(partial(torch.inference_mode()(self._graphs.record_ahead), size, block))

    def runs_several(self, num_rows: int) -> bool:
        """Return whether several decode steps of so many rows may run from one schedule."""
        return self._runs_rows and self._graphs is not None and self._graphs.size_for(num_rows) is not None

    def computed_rows(self, num_rows: int) -> int:
        recorded = self._graphs.size_for(num_rows) if self._graphs is not None else None
        return recorded or num_rows

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    def call(self, run: Callable[[], T]) -> T:
        """Return `run()`, called in the thread that runs the model. No step is in flight."""
        return run() if self._thread is None else self._thread.submit(run).result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, output: ScheduleOutput, run: Callable[[], Results]) -> Results:
        """Run a step at once, on the thread, or in the GPU's queue. The returned function gives its results."""
        size = {"rows": output.num_rows, "sequences": len(output.scheduled)}
        launched = time.perf_counter()

        def traced() -> list[SequenceResult]:
            with self._trace.span("forward", since=launched, step=output.step, **size):
                return run()()

        if self._thread is not None:
            return self._thread.submit(traced).result
        if self._overlap:
            return run()
        results = traced()
        return lambda: results

    @torch.inference_mode()
    def _run(self, output: ScheduleOutput, batch: Batch) -> Results:
        batch = batch.to(self._model.device)
        states = self._state_pool.step(batch.states)
        kv = self._kv_cache
        context = StepContext(batch.slots, batch.paged, kv.keys, kv.values, states=states, index_caches=kv.index_keys)
        # A step of mid-prompt chunks needs no logits, but the module computes at least one row of them.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        features = NO_FEATURES
        if batch.images is not None and self._model.images is not None:
            features = self._model.images.keywords(batch.images, batch.token_ids)
        logits = self._model.forward(batch.token_ids, batch.rotary_positions, rows, context, features=features)
        self.num_forwards += 1
        return torch.inference_mode()(lambda: results_of(output, batch, logits, self._sampler))

    @torch.inference_mode()
    def _decode_with_host(self, output: ScheduleOutput, batch: Batch, inputs: DecodeInputs) -> Results:
        assert self._graphs is not None
        self.num_forwards += 1
        logits = self._graphs.run(inputs).logits
        return torch.inference_mode()(lambda: results_of(output, batch, logits, self._sampler))

    def _decode(self, output: ScheduleOutput, inputs: DecodeInputs) -> _Decode:
        """Run a decode step that needs no host for sampling, here or on the thread."""
        launched, graphs = time.perf_counter(), self._graphs
        assert graphs is not None

        def run() -> DecodedStep:
            span = self._trace.span("forward", since=launched, step=output.step, rows=len(inputs.positions))
            with span, torch.inference_mode():
                self.num_forwards += 1
                step = graphs.run(inputs)
                if not self._overlap or self._thread is not None:
                    step.wait()
                return step

        return _Decode(output, self._thread.submit(run) if self._thread is not None else run())


@dataclass
class _Decode:
    """A decode step whose tokens are in the graphs' buffers."""

    output: ScheduleOutput
    step: Future[DecodedStep] | DecodedStep
    rows: dict[tuple[str, int], int] = field(init=False)  # by sequence and incarnation: of its last known token

    def __post_init__(self) -> None:
        ends = itertools.accumulate((item.num_rows for item in self.output.scheduled), initial=0)
        self.rows = {(item.id, item.incarnation): row for row, item in zip(ends, self.output.scheduled, strict=False)}

    def holds(self, output: ScheduleOutput) -> bool:
        """Return whether `output` is this step, with all or some of its rows."""
        if output.step != self.output.step:
            return False
        return output.scheduled == self.output.scheduled or set(output.scheduled) <= set(self.output.scheduled)

    def results(self, output: ScheduleOutput) -> list[SequenceResult]:
        """Return the results of the rows in `output`. Raises BrokenLogits, and the error of a step that failed."""
        step = self.step.result() if isinstance(self.step, Future) else self.step
        token_ids, logprobs = step.drawn()
        if len(output.scheduled) < len(self.output.scheduled):  # begun ahead, so without drafts
            rows = [self.rows[item.id, item.incarnation] for item in output.scheduled]
            token_ids, logprobs = [token_ids[row] for row in rows], [logprobs[row] for row in rows]
        return drawn_results(output.scheduled, token_ids, logprobs)

    def settle(self) -> None:
        if isinstance(self.step, Future):
            wait([self.step])
        else:
            self.step.wait()


class LaunchedStep(NamedTuple):
    """A step on a runner with one stage."""

    results: Results

    def wait_first_stage(self) -> None:
        """Return at once: the loop needs no wait with one stage."""

    def abandon(self) -> None:
        """Do nothing: a step launched later waits for its turn, and the results are kept by this handle only."""
