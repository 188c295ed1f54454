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

from ..kv.tensors import KVCache
from ..model.attention import StepContext
from ..model.hosted_model import HostedModel
from ..ranks.channel import RankChannel
from ..ranks.remote_errors import is_of_a_group
from ..reports.trace import Trace
from ..running.batch import Batch, build_batch
from ..running.results import results_of
from ..running.sampler import Sampler
from ..sequences.request import Request
from ..sequences.step import ScheduleOutput, SequenceResult
from ..sequences.worker_manager import WorkerSequenceManager
from ..states.tensors import StatePool


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
    ) -> None:
        self.mesh = ranks.mesh
        self._ranks, self._model, self._kv_cache, self._sampler = ranks, model, kv_cache, sampler
        self._state_pool, self._block_size, self._trace = state_pool, block_size, trace
        self.workers = WorkerSequenceManager(self.mesh.pp)
        self.num_forwards = 0
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # to the next stage: kept until received

    def run(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> list[SequenceResult]:
        """Run a step's rows through this stage. Returns the results on the sampling rank and [] elsewhere.

        Raises the step's error, RankFailure if the replica cannot go on, or StepSkipped.
        """
        watch = self._ranks.watch
        watch.enter("forward", output.step)
        hidden = None
        try:
            with self._trace.span("forward", step=output.step, rows=output.num_tokens, sequences=len(output.scheduled)):
                batch = build_batch(output, self.workers, requests, self._block_size, self._model.device)
                hidden = self._receive(batch)
                out = self._forward(batch, hidden)
        except Exception as error:
            self._failed(error, output)
            raise
        if not self.mesh.is_last_stage:
            self._send(out, is_broken=False)
            return []
        # From here on only the controller waits for this rank: an error here affects no other rank.
        return results_of(output, batch, out, self._sampler) if self.mesh.is_sampling_rank else []

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers, on this rank or another."""
        return self._state_pool.is_used

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    @torch.inference_mode()
    def _forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        states = self._state_pool.step(batch.states)
        context = StepContext(batch.slots, batch.paged, self._kv_cache.keys, self._kv_cache.values, states=states)
        # A step of mid-prompt chunks needs no logits, but the module computes at least one row of them.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        received = {} if hidden is None else {"hidden": hidden}
        out = self._model.forward(batch.token_ids, batch.positions, rows, context, **received)
        self.num_forwards += 1
        return out

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
            shape = (output.num_tokens, self._model.hidden_size)
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
        work = self.mesh.stage_group.send([message], self.mesh.local_rank + self.mesh.tp, 0)
        self._sent.append((work, message))
        if len(self._sent) > 4 * self.mesh.pp:  # more than may be in flight
            self._sent.popleft()[0].wait(timedelta(seconds=self._ranks.timeout_s))
