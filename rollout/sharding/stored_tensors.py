"""The tensors of a model folder under the folder's own names, of which a part can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class StoredTensors(Protocol):
    """An open model folder. A context manager: its files close at the end."""

    def __enter__(self) -> StoredTensors:
        """Open the folder."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None:
        """Close its files."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""

    def read(self, name: str) -> Tensor:
        """Read a whole tensor."""

    def read_range(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Read the range [start, stop) of a dimension."""


class MappedFolder:
    """A folder whose files are mapped into memory, and are not written meanwhile: the process ends where one becomes
    shorter."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = ExitStack()
        self._files: dict[str, Any] = {}  # by file name
        self._file_of: dict[str, str] = {}  # by name of the tensor

    def __enter__(self) -> MappedFolder:
        """Open the folder. Raises ValueError where it holds no tensors."""
        if (self._path / SINGLE_FILE).is_file():  # before the index where both are there, as transformers does
            self._file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        elif (self._path / INDEX_FILE).is_file():
            self._file_of = json.loads((self._path / INDEX_FILE).read_text())["weight_map"]
        else:
            raise ValueError(f"model folder {str(self._path)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    def names(self) -> Iterable[str]:
        return self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self._slice(name)[:] if self.shape(name) else self._file(self._file_of[name]).get_tensor(name)

    def read_range(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self._slice(name)[(*(slice(None),) * dim, slice(start, stop))]

    def _slice(self, name: str) -> Any:
        return self._file(self._file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._opened.enter_context(safe_open(self._path / name, "pt"))
        return self._files[name]
