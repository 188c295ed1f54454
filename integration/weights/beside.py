"""Tensors that others wrote in a session before it wrote them itself: its undo data holds their writes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from ...rollout.loop.weight_samples import weight_samples
from ...rollout.model.hosted_model import HostedModel

_Mark = tuple[int, int, bytes]  # version counter and address of a tensor, and a sample of it


class WritesBeside:
    """Compare each tensor that a session is about to overwrite with its state when the session was opened.

    names: tensors found to differ. What a rollback puts back is not the committed weights there.
    """

    def __init__(self, model: HostedModel) -> None:
        """Mark the model's tensors as they are now."""
        self.names: set[str] = set()
        self._tensors = dict(chain(model.resident_tensors(), model.buffers()))
        self._marks = _marks(self._tensors.items())

    def look(self, name: str) -> None:
        """Compare a tensor right before the session overwrites bytes of it for the first time."""
        if _marks([(name, self._tensors[name])])[name] != self._marks[name]:
            self.names.add(name)


def _marks(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, _Mark]:
    tensors = list(tensors)
    samples = weight_samples(tensors)
    return {
        name: (0 if tensor.is_inference() else tensor._version, tensor.data_ptr(), samples[name])
        for name, tensor in tensors
    }
