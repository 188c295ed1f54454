"""The arguments of an attention call: the layout of its rows and keys, and the rule for its scores."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

AttentionPath = Literal["native", "triton", "torch"]


@dataclass(frozen=True)
class ScoreRule:
    """The rule that turns a dot product into a score, and the range of positions that a row sees."""

    scale: float
    window: int | None  # tokens a row sees, itself included
    softcap: float | None


@dataclass(frozen=True)
class PagedStep:
    """The layout of one step's rows and their keys. Built once a step, used by every layer.

    Raises ValueError when the tensors do not fit each other.
    """

    block_tables: Tensor  # [S, max_blocks] int32 ids; entries beyond the context are not read
    query_start: Tensor  # [S + 1] int32, row offsets: sequence s owns rows [query_start[s], query_start[s + 1])
    context_lens: Tensor  # [S] int32, tokens in the KV cache, this step's rows included
    row_ends: Tensor | None = None  # [N] int32: keys that each row sees, see `RowLayout`; None: those up to its own
    layout: "RowLayout" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = {
            "block_tables": self.block_tables,
            "query_start": self.query_start,
            "context_lens": self.context_lens,
        }
        if self.row_ends is not None:
            tensors["row_ends"] = self.row_ends
        wrong = [f"{name} is {t.dtype}, not int32" for name, t in tensors.items() if t.dtype != torch.int32]
        wrong += [
            f"{name} has {t.dim()} dimensions, not {dims}"
            for (name, t), dims in zip(tensors.items(), (2, 1, 1, 1), strict=False)
            if t.dim() != dims
        ]
        if not wrong:
            num_sequences = self.context_lens.shape[0]
            if self.block_tables.shape[0] != num_sequences or self.query_start.shape[0] != num_sequences + 1:
                wrong.append(
                    f"block_tables {list(self.block_tables.shape)}, "
                    f"query_start {list(self.query_start.shape)} and context_lens "
                    f"{list(self.context_lens.shape)} speak of different numbers of sequences"
                )
            wrong += [f"{name} is not contiguous" for name, t in tensors.items() if t.numel() and t.stride(-1) != 1]
        if len({t.device for t in tensors.values()}) > 1:
            wrong.append(f"devices differ: { ({name: str(t.device) for name, t in tensors.items()}) }")
        if wrong:
            raise ValueError("PagedStep: " + "; ".join(wrong))
        layout = RowLayout(self.query_start, self.context_lens, self.block_tables, self.row_ends)
        object.__setattr__(self, "layout", layout)


@dataclass(frozen=True)
class NewRows:
    """KV of a step's rows, written into the caches before attention reads them."""

    key: Tensor  # [N, K, D]
    value: Tensor  # [N, K, E]
    slots: Tensor  # [N] int64, contiguous: block * block_size + offset


@dataclass(frozen=True)
class RowLayout:
    """A PagedStep, or the packed sequences of `varlen_attention` (then both tensors are None), for the paths."""

    query_start: Tensor
    context_lens: Tensor | None
    block_tables: Tensor | None
    # int32 [N]: the number of keys of its sequence that each row sees, from the first on, less those before its window;
    # ascending in a sequence, above the row's position and up to the context. None: the keys up to the row's own.
    row_ends: Tensor | None = None
    # Results for tensors of one kind, so that a step's layers compute them once: checks, and structures of a path.
    fitting: set[tuple[Any, ...]] = field(default_factory=set, repr=False, compare=False)
    prepared: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False, compare=False)


def ends_fit(layout: RowLayout, first_row: int, num_rows: int, context: int) -> bool:
    """Return whether a sequence's `row_ends` are what `RowLayout` says. Reads them on the host."""
    if layout.row_ends is None:
        return True
    ends = layout.row_ends[first_row : first_row + num_rows].tolist()
    above = all(end > position for position, end in enumerate(ends, context - num_rows))
    return above and ends == sorted(ends) and all(end <= context for end in ends)


def refuse_layout(sequence: int, layout: RowLayout, num_rows: int) -> None:
    """Raise ValueError for a sequence that does not fit the step; -1 stands for the row offsets."""
    starts = layout.query_start.tolist()
    if sequence < 0:
        raise ValueError(f"query_start runs from {starts[0]} to {starts[-1]}, but the query has {num_rows} rows")
    message = f"sequence {sequence}: rows {starts[sequence]} to {starts[sequence + 1]}"
    if layout.context_lens is not None and layout.block_tables is not None:
        message += f", context {int(layout.context_lens[sequence])}, blocks {layout.block_tables[sequence].tolist()}"
    if layout.row_ends is not None:
        message += f", keys of rows {layout.row_ends[starts[sequence] : starts[sequence + 1]].tolist()}"
    raise ValueError(message + " do not fit the query and the cache")
