"""Pieces of tensors under names of their own, as published models have them.

A piece is one run of the elements of a resident tensor, in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Piece(Protocol):
    """A named run of a tensor's elements; a tensor under another name is a piece that is all of it."""

    @property
    def name(self) -> str: ...

    @property
    def whole(self) -> str:
        """The name of the tensor that it is a piece of."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def offset(self) -> int:
        """The number of elements of the tensor before it."""


class Pieces(Protocol):
    """The pieces of a model's tensors by their names."""

    def piece(self, name: str) -> Piece | None:
        """Return the piece of that name; None for any other name. Raises ValueError for a tensor that is no such
        run."""

    def siblings(self, name: str) -> Sequence[Piece]:
        """Return all pieces of the same tensor, in their order; none where their names are not known."""
