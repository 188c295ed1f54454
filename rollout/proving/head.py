"""The logits of a large forward, computed some rows at a time.

A forward of many rows is fast, but its logits may be larger than any cache, or than the memory. So the module runs up
to the hidden states that leave its decoder, and its own code behind that, the head and scales of logits, then runs over
some rows of these after the others. A module's code is recognised by its results: the parts of a trial must have the
bits of the whole.

Letters: N rows of a forward, R rows that get logits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..model.hosted_model import HostedModel
from ..model.operations.fused_layers import has_hooks
from ..model.steps.context import StepContext
from ..model.steps.pools import TRIAL_ROWS, has_bits_of, trial_step


class HeadInParts:
    """The logits of a hosted model's forward, in parts."""

    def __init__(self, model: HostedModel) -> None:
        self._model = model

    def is_recognised(self) -> bool:
        """Return whether a trial's logits in parts are those of its whole forward. Call it in the rollout phase."""
        decoder = _decoder(self._model)
        if decoder is None or has_hooks([self._model.module, decoder]):
            return False
        ids, positions, step = trial_step(self._model)
        rows = positions[1:]
        return has_bits_of(
            lambda: torch.cat(list(self.logits(ids, positions, rows, step, TRIAL_ROWS // 2))),
            lambda: self._model.forward(ids, positions, rows, step),
        )

    def logits(self, ids: Tensor, positions: Tensor, rows: Tensor, step: StepContext, most: int) -> Iterator[Tensor]:
        """Run the model over ids and positions [N], and yield the logits [at most `most`, V] of rows [R], in order."""
        decoder = _decoder(self._model)
        assert decoder is not None
        run, outputs = decoder.forward, []

        def end(*args: Any, **kwargs: Any) -> None:
            outputs.append(run(*args, **kwargs))
            raise _Ended

        with _calling(decoder, end), suppress(_Ended):
            self._model.forward(ids, positions, rows, step)
        (output,) = outputs
        hidden = output.last_hidden_state[0]
        if step.wanted is None:  # else the last layer has left out the others
            hidden = hidden[rows]
        for part in hidden.split(most):
            given = type(output)(**{**output, "last_hidden_state": part.unsqueeze(0)})
            with _calling(decoder, lambda *_, given=given, **__: given):
                logits = self._model.forward(ids[: len(part)], positions[: len(part)], None, step)
            yield logits


class _Ended(Exception):
    """The decoder has returned."""


def _decoder(model: HostedModel) -> nn.Module | None:
    base = model.module.base_model
    return base if base is not model.module else None


@contextmanager
def _calling(decoder: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Put another forward in the place of a module's own."""
    before = vars(decoder).get("forward")
    decoder.forward = forward
    try:
        yield
    finally:
        if before is None:
            del decoder.forward
        else:
            decoder.forward = before
