"""This rank's share of a step in a replica: its layers, between the stage before and the stage after.

Hidden states are sent with one extra row, a flag that the step failed at an earlier stage. A stage after a failed one
therefore does not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.sampling.draws import RowSettings
from ...kernels.sampling.parts import DrawnRows, draw_parts, keeps_all, serves_parts
from ..kv.tensors import KVCache
from ..media.encoder import NO_FEATURES
from ..model.hosted_model import HostedModel
from ..model.steps.context import StepContext
from ..ranks.channel import RankChannel
from ..ranks.remote_errors import is_of_a_group
from ..reports.trace import Trace
from ..running.batch import Batch, build_batch
from ..running.decode_buffers import DecodeInputs
from ..running.results import results_of
from ..running.sampler import Sampler
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from ..sequences.worker_manager import WorkerSequenceManager
from ..states.tensors import StatePool
from .stage_graphs import Ending, StageGraphs


class StepSkipped(Exception):
    """An earlier stage failed and has reported it to the controller."""


class Stage:
    """The layers of this rank. It runs steps in the order of their launches."""

    def __init__(
        self,
        ranks: RankChannel,
        model: HostedModel,
        kv_cache: KVCache,
        state_pool: StatePool,
        sampler: Sampler,
        block_size: int,
        trace: Trace,
        graphs: StageGraphs | None = None,
    ) -> None:
        self.mesh, self._graphs = ranks.mesh, graphs
        self._ranks, self._model, self._kv_cache, self._sampler = ranks, model, kv_cache, sampler
        self._state_pool, self._block_size, self._trace = state_pool, block_size, trace
        self.workers = WorkerSequenceManager(self.mesh.pp)
        self.num_forwards = 0
        self.num_divided_draws = 0  # read by tests: steps whose tokens were drawn without the whole logits
        self._draws_parts = self._agree_on_parts()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # to the next stage: kept until received

    def _agree_on_parts(self) -> bool:
        """Return whether every rank of the stage can draw from its part of the vocabulary. A collective of these."""
        model, columns = self._model, self._model.numerics.divided_logits
        if columns is None or not self.mesh.is_last_stage:  # alike on all of them
            return False
        can = serves_parts(len(columns.part), model.dtype, model.device)
        return bool(columns.gather(torch.tensor([int(can)], device=model.device)).all())

    def run(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> list[SequenceResult]:
        """Run a step's rows through this stage. Returns the results on the sampling rank and [] elsewhere.

        Raises the step's error, RankFailure if the replica cannot go on, or StepSkipped.
        """
        watch = self._ranks.watch
        watch.enter("forward", output.step)
        hidden = None
        try:
            with self._trace.span("forward", step=output.step, rows=output.num_rows, sequences=len(output.scheduled)):
                batch = build_batch(output, self.workers, requests, self._block_size, self._model.device)
                hidden = self._receive(batch)
                out = self._forward(batch, hidden)
        except Exception as error:
            self._failed(error, output)
            raise
        if not self.mesh.is_last_stage:
            assert isinstance(out, Tensor)
            self._send(out, is_broken=False)
            return []
        # From here on only the controller waits for this rank: an error here affects no other rank.
        if not self.mesh.is_sampling_rank:
            return []
        return results_of(output, batch, out, self._sampler)

    def computed_rows(self, num_rows: int) -> int:
        """Return the rows that a step of so many decode rows computes: more where it is padded to a recorded size."""
        recorded = self._graphs.size_for(num_rows) if self._graphs is not None else None
        return recorded or num_rows

    def release_memory(self) -> None:
        """Drop all records before KV or weights are released. No step is in flight."""
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers, on this rank or another."""
        return self._state_pool.is_used

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    @torch.inference_mode()
    def _forward(self, batch: Batch, hidden: Tensor | None) -> Tensor | DrawnRows:
        """Return hidden states, logits, or the tokens that the ranks of the last stage have drawn together."""
        settings = self._settings_of_parts(batch)
        self.num_forwards += 1
        self.num_divided_draws += settings is not None
        graphs = self._graphs
        if graphs is not None and batch.is_decode and graphs.size_for(len(batch.sampled)) is not None:
            return self._replay(graphs, batch, hidden, settings)
        states = self._state_pool.step(batch.states)
        kv = self._kv_cache
        context = StepContext(batch.slots, batch.paged, kv.keys, kv.values, states=states, index_caches=kv.index_keys)
        # A step of mid-prompt chunks needs no logits, but the module computes at least one row of them.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        features = NO_FEATURES
        if batch.images is not None and self._model.images is not None:  # each rank encodes them, with equal bits
            features = self._model.images.keywords(batch.images, batch.token_ids)
        out = self._model.forward(
            batch.token_ids, batch.rotary_positions, rows, context, hidden, whole_logits=settings is None,
            features=features,
        )  # fmt: skip
        if settings is None:
            return out
        columns = self._model.numerics.divided_logits
        assert columns is not None and out.shape[-1] == len(columns.part), out.shape
        return draw_parts(out, settings, batch.positions[batch.logit_rows] + 1, columns.part.start, columns.gather)

    def _replay(
        self, graphs: StageGraphs, batch: Batch, hidden: Tensor | None, settings: RowSettings | None
    ) -> Tensor | DrawnRows:
        """Run a decode step whose rows fit the ladder as a recorded one. settings: of a draw from parts."""
        ending: Ending = "output" if settings is None else "draw parts"
        if settings is None and self.mesh.is_sampling_rank and not batch.allowed:
            settings = self._sampler.settings_of([row.request for row in batch.sampled])
            ending = "output" if settings is None else "draw"
        inputs = DecodeInputs(
            batch.token_ids.numpy(), batch.positions.numpy(), batch.slots.numpy(), batch.paged.block_tables.numpy(),
            settings, states=None if batch.states is None else batch.states.numpy(),
            rotary=None if batch.images is None else batch.rotary_positions.numpy(),
        )  # fmt: skip
        return graphs.step(inputs, hidden, ending)

    def _settings_of_parts(self, batch: Batch) -> RowSettings | None:
        """Return the settings of a batch that the ranks can draw from without the whole logits, else None.

        Every rank of the stage decides alike: from the requests, never from what has come of them so far.
        """
        if not self._draws_parts or not batch.sampled or batch.prompts or batch.jumps or batch.allowed:
            return None
        requests = [row.request for row in batch.sampled]
        if any(request.params.min_new_tokens for request in requests):
            return None
        settings = self._sampler.settings_of(requests)
        return settings if settings is not None and keeps_all(settings) else None

    def _failed(self, error: Exception, output: ScheduleOutput) -> None:
        """Keep the other ranks from waiting for this one in vain. Raises RankFailure if the replica cannot go on."""
        ranks, mesh = self._ranks, self.mesh
        if is_of_a_group(error):
            neighbours = [r for r in range(mesh.num_ranks) if r != mesh.local_rank and r // mesh.tp == mesh.pp_rank]
            before = [] if mesh.is_first_stage else [mesh.local_rank - mesh.tp]
            what = f"did not take part in step {output.step} of {ranks.watch.describe(mesh.local_rank)}"
            raise ranks.explain(neighbours + before, what) from error
        if mesh.tp > 1:  # the other ranks of the stage are in a collective that this one left
            what = f"failed in step {output.step}: {type(error).__name__}: {error}"
            raise ranks.lose([mesh.local_rank], what) from error
        if not mesh.is_last_stage:
            shape = (output.num_rows, self._model.hidden_size)
            self._send(torch.zeros(shape, dtype=self._model.dtype, device=self._model.device), is_broken=True)

    # -- between stages ---------------------------------------------------------------------------------------------

    def _receive(self, batch: Batch) -> Tensor | None:
        """Receive the hidden states [N, D] of the stage before; None on the first stage."""
        if self.mesh.is_first_stage:
            return None
        assert self.mesh.stage_group is not None
        with self._ranks.watch.phase("waiting for hidden states"):
            shape = (len(batch.slots) + 1, self._model.hidden_size)
            hidden = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
            before = self.mesh.local_rank - self.mesh.tp
            self.mesh.stage_group.recv([hidden], before, 0).wait(timedelta(seconds=self._ranks.timeout_s))
        if bool(hidden[-1, 0]):
            raise StepSkipped
        return hidden[:-1]

    def _send(self, hidden: Tensor, *, is_broken: bool) -> None:
        assert self.mesh.stage_group is not None
        flag = torch.full_like(hidden[:1], float(is_broken))
        message = torch.cat([hidden, flag])
        after = self.mesh.local_rank + self.mesh.tp
        try:
            work = self.mesh.stage_group.send([message], after, 0)
            self._sent.append((work, message))
            if len(self._sent) > 4 * self.mesh.pp:  # more than may be in flight
                self._sent.popleft()[0].wait(timedelta(seconds=self._ranks.timeout_s))
        except RuntimeError as error:
            what = f"did not take the hidden states of {self._ranks.watch.describe(self.mesh.local_rank)}"
            raise self._ranks.explain([after], what) from error
