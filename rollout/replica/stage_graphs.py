"""Decode steps of a stage, recorded and replayed, between the stage before and the stage after.

All ranks of a stage record the same steps: their exchanges through shared memory are calls of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ...kernels.sampling.draws import draw_tokens
from ...kernels.sampling.parts import DrawnRows, draw_parts
from ..kv.tensors import KVCache
from ..model.hosted_model import HostedModel
from ..running.cpu_graphs import CPUGraphs
from ..running.decode_buffers import DecodeInputs
from ..running.decode_graphs import DecodeGraphs, padded_rows
from ..running.recorders import Run
from ..states.tensors import StatePool

# The end of a stage's step: its output (hidden states or whole logits), tokens drawn from whole logits, or tokens that
# the ranks draw together from their parts of the vocabulary.
Ending = Literal["output", "draw", "draw parts"]


class StageGraphs(DecodeGraphs):
    """Decode steps of this rank's layers at the sizes of a ladder."""

    def __init__(
        self, model: HostedModel, kv_cache: KVCache, state_pool: StatePool, sizes: Sequence[int], width: int
    ) -> None:
        super().__init__(
            model, kv_cache, state_pool, sizes, width, CPUGraphs(model.module, model.mesh.tp_memory)
        )  # fmt: skip
        self._hidden = torch.zeros(self.sizes[-1], model.hidden_size, dtype=model.dtype)  # of the stage before

    def step(self, inputs: DecodeInputs, hidden: Tensor | None, ending: Ending) -> Tensor | DrawnRows:
        """Run a step whose rows fit the ladder. Its results may be overwritten by the next step.

        hidden: [n, D] of the stage before; None on the first stage. Only the last stage draws.
        """
        num_rows = len(inputs.positions)
        if hidden is not None:
            size = self.size_for(num_rows)
            assert size is not None, num_rows
            self._hidden[:size].copy_(hidden[torch.from_numpy(padded_rows(inputs, size))])
        results, _ = self._run(inputs, ending, partial(self._stage_step, ending, hidden is not None))
        if ending == "output":
            return results[0][:num_rows]
        return DrawnRows(results[0][:num_rows], results[1][:num_rows])

    def _stage_step(self, ending: Ending, has_hidden: bool, size: int) -> Run:
        """Return the step over the buffers that is recorded."""
        b, columns = self._buffers, self._model.numerics.divided_logits
        hidden = self._hidden[:size] if has_hidden else None
        forward = self._forward(size, hidden, whole_logits=ending != "draw parts")
        settings, positions = b.first_settings(size), b.noise_positions[:size]

        def run() -> Sequence[Tensor]:
            out = forward()
            if ending == "output":
                return (out,)
            if ending == "draw":
                tokens = draw_tokens(out, settings, positions)
                return tokens.token_ids, tokens.logprobs
            assert columns is not None and out.shape[-1] == len(columns.part), out.shape
            drawn = draw_parts(out, settings, positions, columns.part.start, columns.gather)
            return drawn.token_ids, drawn.logprobs

        return run
