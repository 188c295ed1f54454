"""Rows that packed sequences have in common, as those of a prompt with several answers: a model computes them once.

A row's value depends on the tokens of its sequence up to its own alone, so that sequences that begin alike may have
one row for each token of their common beginning. Only attention and recurrences look from row to row: what they are
given is spread to whole sequences, and each row's result is taken from the first of its tokens.

Dimension letters: N rows, L tokens of all sequences, with L > N where rows are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SharedRows:
    """The rows of the tokens of S packed sequences, one sequence after another."""

    starts: Tensor  # int32 [S + 1]: the first token of each sequence, and the end
    row_of: Tensor  # int64 [L]: the row of each token
    own: Tensor  # int64 [N]: the first token of each row
    # Further tokens of rows, and these rows, int64: in the n-th pair, each row's (n + 2)-nd token, if it has as many.
    others: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], device: torch.device) -> SharedRows:
        """Take the rows of the tokens of each sequence; new rows are numbered as they come. Raises ValueError for
        others."""
        own: list[int] = []
        seen: list[int] = []  # tokens of each row so far
        others: list[tuple[list[int], list[int]]] = []
        starts = [0, *accumulate(len(sequence) for sequence in sequences)]
        row_of = [row for sequence in sequences for row in sequence]
        for token, row in enumerate(row_of):
            if row == len(own):
                own.append(token)
                seen.append(0)
            elif 0 <= row < len(own):
                if seen[row] == len(others):
                    others.append(([], []))
                tokens, rows = others[seen[row]]
                tokens.append(token)
                rows.append(row)
                seen[row] += 1
            else:
                raise ValueError(f"token {token} has row {row}, where rows 0 to {len(own)} may come")

        def on_device(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        pairs = tuple((on_device(tokens), on_device(rows)) for tokens, rows in others)
        return cls(on_device(starts).to(torch.int32), on_device(row_of), on_device(own), pairs)

    @property
    def num_rows(self) -> int:
        return len(self.own)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequences."""
        return len(self.row_of)

    @property
    def positions(self) -> Tensor:
        """The place of each row in its sequences, int64 [N]."""
        owner = torch.searchsorted(self.starts, self.own, right=True) - 1
        return self.own - self.starts[owner]

    def spread(self, rows: Tensor) -> Tensor:
        """Return the values of the tokens [L, ...], from those of the rows [N, ...]. The gradient is `summed`."""
        return _Taken.apply(rows, self.row_of, self.summed)

    def kept(self, tokens: Tensor) -> Tensor:
        """Return the values of the rows [N, ...], from those of the tokens [L, ...], which are equal where a row has
        several. The gradient is `spread_gradient`."""
        return _Taken.apply(tokens, self.own, self.spread_gradient)

    def spread_gradient(self, of_rows: Tensor) -> Tensor:
        """Return the gradients of the tokens of `kept` [L, ...], from those of the rows: all of it is the first's."""
        found = of_rows.new_zeros(self.num_tokens, *of_rows.shape[1:])
        found[self.own] = of_rows
        return found

    def summed(self, tokens: Tensor) -> Tensor:
        """Return the sums of the values of each row's tokens [N, ...], in their order: in fp32, cast back at the
        end."""
        total = tokens[self.own].float()
        for places, rows in self.others:
            total.index_add_(0, rows, tokens[places].float())  # no row is in it twice, so that no order matters
        return total.to(tokens.dtype)


class _Taken(torch.autograd.Function):
    """Rows of a tensor by their numbers, with a gradient that is computed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, numbers: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return values[numbers]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad), None, None
