"""A reader of single tensors of a folder's plan, or of parts of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor

from ..errors import TransferFailed
from .folder import DiskPlan, open_unchanged, read_exactly


class PlanReader:
    """The files of a plan, open. A context manager: they close at the end.

    Their bytes are read and never mapped: where a file becomes shorter meanwhile, as under a trainer that writes its
    next checkpoint to the same path, memory that maps it ends the process.
    """

    def __init__(self, plan: DiskPlan) -> None:
        self._plan = plan
        self._tensors = {tensor.spec.name: tensor for tensor in plan.tensors}
        self._descriptors: dict[str, int] = {}  # by file
        self._opened = ExitStack()

    def __enter__(self) -> PlanReader:
        """Open the files. Raises TransferFailed for one that changed or vanished since the plan was made."""
        with ExitStack() as opened:
            for file in self._plan.files:
                self._descriptors[file] = open_unchanged(self._plan, file)
                opened.callback(os.close, self._descriptors[file])
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensors[name].spec.shape

    def read(self, name: str) -> Tensor:
        """Read a whole tensor. Raises TransferFailed where its file became shorter."""
        shape = self.shape(name)
        return self._rows(name, 0, shape[0]) if shape else self._rows(name, 0, 1).reshape(())

    def read_range(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Read the range [start, stop) of a dimension. Raises TransferFailed where its file became shorter."""
        return self._rows(name, start, stop) if dim == 0 else self.read(name).narrow(dim, start, stop - start)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) of a tensor, which has one row if it has no dimensions."""
        tensor = self._tensors[name]
        num_rows, *width = tensor.spec.shape or (1,)
        row_bytes = tensor.spec.num_bytes // max(num_rows, 1)
        data = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        found = read_exactly(
            self._descriptors[tensor.file], memoryview(data.numpy()), tensor.offset + start * row_bytes
        )
        if found < data.numel():
            raise TransferFailed(f"disk: {tensor.file} became shorter while {tensor.spec.describe()} was read")
        return data.view(tensor.spec.dtype).view(stop - start, *width)
