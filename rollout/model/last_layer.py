"""The last layer of a step, of which few rows are read.

A prefill reads the logits of few rows: those after which tokens are drawn. In the layers before the last every row
matters to later rows, in the last one only its keys and values do. So the last layer runs over all rows up to its
attention, which writes them, and then as a whole over the rows that are read. No row's bits depend on the rows beside
it, so these are those of a forward of all rows. A module's code is recognised by its results: a trial step that leaves
rows out must give the logits of one that does not.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.modeling_layers import GradientCheckpointingLayer

from .operations.carried import STEP_KEYWORD, carried, carrying, told
from .operations.fused_layers import has_hooks
from .operations.packed_rows import NO_MASK
from .steps.context import KVWritten, StepContext
from .steps.pools import Hosted as Steppable
from .steps.pools import has_bits_of, trial_step

logger = logging.getLogger(__name__)

_MOST_WANTED = 0.25  # of a step's rows: attention over single rows costs more than over the rows of a sequence
_BY_ROW = ("position_ids", "position_embeddings", "per_layer_input")  # arguments that have a row for each token too

Forward = Callable[..., Any]


class Hosted(Steppable, Protocol):
    """A hosted model, as the trial needs it."""

    @property
    def call(self) -> Callable[..., Tensor]: ...


class LastLayer:
    """The last decoder layer of a module, which leaves out rows once their KV is written."""

    def __init__(self, layer: nn.Module, index: int, behind: Sequence[nn.Module]) -> None:
        """Take the layer. index: that of its attention in the whole model; behind: the modules around and after it."""
        self.module, self._index = layer, index
        parameters = inspect.signature(layer.forward).parameters
        self._names = list(parameters)
        self._takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._seeing = [*layer.modules(), *behind]  # modules whose hooks would see that rows are left out
        self._is_recognised: bool | None = None  # None until it was tried

    @classmethod
    def of(cls, root: nn.Module, index: int) -> LastLayer | None:
        """Return the one decoder layer with the attention of this index; None if there is none, or several."""
        layers = [part for part in root.modules() if isinstance(part, GradientCheckpointingLayer)]
        found = [layer for layer in layers if any(getattr(m, "layer_idx", None) == index for m in layer.modules())]
        if len(found) != 1:
            return None
        in_layers = {part for layer in layers for part in layer.modules()}
        return cls(found[0], index, [part for part in root.modules() if part not in in_layers])

    def leaves_out(self, hosted: Hosted, rows: Tensor | None, num_rows: int) -> bool:
        """Return whether to leave rows out in a step of so many that is read at `rows` only; None: at all.

        It leaves none out where that is faster, and where a hook waits for all. The first step that may leave some out
        tries the module's code before it runs.
        """
        if rows is None or len(rows) > num_rows * _MOST_WANTED or has_hooks(self._seeing):
            return False
        if self._is_recognised is None:
            self._is_recognised = self._try(hosted)
            logger.info("prefills %s the last layer's unread rows", "leave out" if self._is_recognised else "compute")
        return self._is_recognised

    def _try(self, hosted: Hosted) -> bool:
        """Return whether a step that leaves rows out gives the bits of one that leaves out none."""
        if self._index in hosted.state_shapes:  # later rows need its states as well
            return False
        ids, positions, step = trial_step(hosted)
        wanted = positions[-2:-1]
        return has_bits_of(
            lambda: hosted.call(ids, positions, replace(step, wanted=wanted), None, None),
            lambda: hosted.call(ids, positions, step, None, None)[wanted],
        )

    def narrowing(self, forward: Forward) -> Forward:
        """Return a forward of the layer that gives the hidden states of the step's `wanted` rows, where it has some.

        It raises ValueError for a tensor among its arguments whose rows are not known.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            step = told(kwargs).get(STEP_KEYWORD)
            if not isinstance(step, StepContext) or step.wanted is None:
                return forward(*args, **kwargs)
            named = {**dict(zip(self._names, args, strict=False)), **kwargs}
            if len(named) < len(args) + len(kwargs):
                raise ValueError(f"{type(self.module).__name__} takes {len(args)} arguments, some without a name")
            with suppress(KVWritten):
                in_step(replace(step, wanted=None, ends_at=self._index), named)
                raise AssertionError("the last layer did not call its attention")
            few = {name: self._rows_of(name, value, step) for name, value in named.items() if name != STEP_KEYWORD}
            return in_step(step.of_wanted(), few)

        def in_step(step: StepContext, named: Mapping[str, Any]) -> Any:
            now = {STEP_KEYWORD: step}
            with carrying({**(carried() or {}), **now}):
                return forward(**{**named, **now}) if takes_step else forward(**named)

        takes_step = STEP_KEYWORD in self._names or self._takes_all
        return run

    def _rows_of(self, name: str, value: object, step: StepContext) -> object:
        """Return the wanted rows of an argument [1, N, ...], or of a tuple of such."""
        wanted, num_rows = step.wanted, len(step.slots)
        assert wanted is not None

        def rows_of(found: object) -> object:
            if not isinstance(found, Tensor) or found is NO_MASK:
                return found
            if name not in (self._names[0], *_BY_ROW) or found.dim() < 2 or found.shape[:2] != (1, num_rows):
                kind = type(self.module).__name__
                raise ValueError(f"{kind} takes {name} {list(found.shape)}, and its rows are not known")
            return found.index_select(1, wanted)

        return tree_map(rows_of, value)
