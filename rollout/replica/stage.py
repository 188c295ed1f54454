"""This rank's share of a step in a replica: its layers, between the stage before and the stage after.

Hidden states travel with one row more than the step has: it says whether the step failed on the way, so that a stage
behind one that failed does not wait for it.
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


class StepSkipped(Exception):
    """A stage before this one failed; it has told the controller."""


class Stage:
    """Runs the layers of this rank, in the order in which steps are launched."""

    def __init__(
        self,
        ranks: RankChannel,
        model: HostedModel,
        kv_cache: KVCache,
        sampler: Sampler,
        block_size: int,
        trace: Trace,
    ) -> None:
        self.mesh = ranks.mesh
        self._ranks, self._model, self._kv_cache, self._sampler = ranks, model, kv_cache, sampler
        self._block_size, self._trace = block_size, trace
        self.workers = WorkerSequenceManager(self.mesh.pp)
        self.num_forwards = 0
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # to the next stage: kept until it must have them

    def run(self, output: ScheduleOutput, requests: Mapping[str, Request]) -> list[SequenceResult]:
        """Run a step's rows through this stage; results on the sampling rank, nothing elsewhere.

        Raises what failed, RankFailure where the replica cannot go on, or StepSkipped.
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
        # From here on nobody waits for this rank but the controller: what fails here fails alone.
        return results_of(output, batch, out, self._sampler) if self.mesh.is_sampling_rank else []

    def forget(self, request: Request) -> None:
        self._sampler.forget(request)

    @torch.inference_mode()
    def _forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        context = StepContext(batch.slots, batch.paged, self._kv_cache.keys, self._kv_cache.values)
        # A step of mid-prompt chunks needs no logits; the module wants at least one row to make them for.
        rows = batch.logit_rows if len(batch.logit_rows) else batch.slots.new_zeros(1)
        received = {} if hidden is None else {"hidden": hidden}
        out = self._model.forward(batch.token_ids, batch.positions, rows, context, **received)
        self.num_forwards += 1
        return out

    def _failed(self, error: Exception, output: ScheduleOutput) -> None:
        """See to it that nobody waits for this rank in vain. Raises RankFailure where that ends the replica."""
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
        """Hidden states [N, D] of the stage before; None at the first."""
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
        if len(self._sent) > 4 * self.mesh.pp:  # more than may be in the air
            self._sent.popleft()[0].wait(timedelta(seconds=self._ranks.timeout_s))
