"""The sequences of a trainer's forward: one a batch row, padded on the right, or several packed in one row."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import cast

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ....kernels.attention.row_ends import row_ends, runs_of
from ..layer_probe import PROBING, MaskFunction
from ..steps.context import StepContext
from ..steps.masks import has_blocks
from .carried import PACKING, STEP_KEYWORD, carried, needs_mask

# transformers' mask functions pass a 4-D attention mask on unchanged. This one means that the attention needs no mask.
NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.float32)
PACKED = torch.zeros(1, 1, 1, 0, dtype=torch.float32)  # mask of a packed row: needs cu_seq_lens_q
_newest = threading.local()  # position_ids that were found to be of whole rows, and their version; ends of blocks
_STARTS_OVER = "position_ids start over within a row: pass cu_seq_lens_q to say where sequences begin"


def query_start(
    mask: Tensor | None, packed: Tensor | None, positions: object, batch: int, num_rows: int, query: Tensor
) -> Tensor:
    """Return row offsets [S + 1] of the sequences of a forward: the caller's packing, or one sequence a batch row."""
    device = query.device
    if PROBING.get() is not None:
        mask = None  # it may be the probe's own
    if packed is not None:
        if batch != 1:
            raise ValueError(f"packed sequences (cu_seq_lens_q) stand in one row, not in a batch of {batch}")
        return packed.to(device=device, dtype=torch.int32)
    are_blocks = mask is not None and has_blocks(mask)  # of one image alone they are zeros, too
    if mask is not None and mask.shape[:3] == (1, 1, 1) and mask is not NO_MASK and not are_blocks and not mask.any():
        mask = PACKED  # DeepSeek-V4's code makes masks longer by zeros
    if mask is PACKED or (mask is not None and are_blocks and mask.shape[2] > 1):
        raise ValueError(_STARTS_OVER)
    if mask is not None and mask is not NO_MASK and not are_blocks:
        raise ValueError("a 4-D attention mask is not supported: attention is causal within each sequence")
    refuse_packed_positions(positions)
    return torch.arange(0, (batch + 1) * num_rows, num_rows, dtype=torch.int32, device=device)


def ends_of_blocks(mask: Tensor, query_start: Tensor, context_lens: Tensor | None) -> Tensor:
    """Return the keys that each row sees, int32 [N] (`row_ends`), for a mask that `has_blocks`. The layers of a
    forward, which have the same sequences, compute them once."""
    seen, ends = getattr(_newest, "blocks", (None, None))
    if seen is not None and seen() is mask:
        return cast(Tensor, ends)
    found = row_ends(mask.flatten(), query_start, context_lens)
    _newest.blocks = weakref.ref(mask), found
    return found


def refuse_packed_positions(positions: object) -> None:
    """Raise ValueError for position_ids [B, T] that count on after they have started over, as in packed rows.

    transformers' mask tells of them in a forward without a cache alone. Positions that stay or fall up to the end of a
    row are those of padding. The layers of a forward, which have the same positions, look at them once: on a GPU that
    waits for all that was launched.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    version = None if positions.is_inference() else positions._version  # such a tensor has none
    seen, seen_version = getattr(_newest, "positions", (None, None))
    if version is not None and seen is not None and seen() is positions and seen_version == version:
        return
    counts_on = positions.diff(dim=-1) == 1
    if bool((counts_on & (~counts_on).cumsum(-1).bool()).any()):
        raise ValueError(_STARTS_OVER)
    _newest.positions = weakref.ref(positions), version


def hosted_mask(
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    mask_function: Callable[..., Tensor | bool] | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: object,
) -> Tensor | None:
    """Check the attention mask and return None in its place, or a marker of packed rows. Where tokens of blocks, as of
    images, see each other both ways it returns these: int64 [B, 1, 1, T], of packed rows [1, 1, T, 1], the same number
    for the tokens of a block, and a negative one for those of none.

    The attention is causal per sequence, and rows after a sequence's end change no other row, so it needs no mask.
    attention_mask [B, T], true where a token is. In the start-up forward the probe gives a mask of its own. Raises
    ValueError for padding on the left, and for blocks that are longer than a window beside which they are seen.
    """
    if mask_function is bidirectional_mask_function:  # of an encoder of images, whose attention refuses padding
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask[:, None, None]
    blocks = _Blocks.of(mask_function)
    if blocks is not None and not blocks.are_there:
        mask_function, allow_is_causal_skip = blocks.others, not blocks.is_packed
    probe = PROBING.get()
    if probe is not None and attention_mask is None:
        return probe.mask_made(None if use_vmap else cast(MaskFunction | None, mask_function), local_size)
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError("attention_mask has padding before tokens: pad on the right")
    if blocks is not None and blocks.are_there:
        return blocks.mask(local_size)
    if allow_is_causal_skip and not needs_mask():
        return None
    # An indexer's model asks for a mask in any case; of packed rows the function is another one.
    return NO_MASK if mask_function is causal_mask_function else PACKED


# -- transformers' functions of masks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """The blocks of tokens that may see each other in a mask (Gemma 3, Gemma 4, PaliGemma)."""

    ids: Tensor  # [B, T]: of the block that a token is of; negative: of none
    is_packed: bool  # several sequences stand in a row
    others: Callable[..., Tensor | bool]  # the function of the mask without blocks, as far as they stand apart in it

    @classmethod
    def of(cls, function: object) -> _Blocks | None:
        """Return the blocks of a mask's function; None if it has none. Raises ValueError for one with more parts than
        blocks, packed sequences, a window and the causal rule."""
        parts = list(_leaves(function))
        found = [
            ids for part in parts if (ids := _held(part, "blockwise_overlay").get("block_sequence_ids")) is not None
        ]
        if len(found) != 1 or not isinstance(found[0], Tensor):
            return None
        known = ("blockwise_overlay", "packed_sequence_mask_function", "sliding_window_overlay")
        if not all(part is causal_mask_function or any(_held(part, name) for name in known) for part in parts):
            raise ValueError("tokens of images attend to each other here by rules of the model's own: not supported")
        is_packed = any(_held(part, "packed_sequence_mask_function") for part in parts)
        beside = _parts(function, "or_masks")
        return cls(found[0], is_packed, cast(Callable[..., Tensor | bool], beside[0] if beside else function))

    @property
    def are_there(self) -> bool:
        return bool((self.ids >= 0).any())

    def mask(self, window: int | None) -> Tensor:
        """Return `hosted_mask` of them. window: of other tokens, beside which rows see their whole block."""
        batch, length = self.ids.shape
        if window is not None and length > window:
            ids = self.ids.flatten()
            _, ends = runs_of(ids, _carried_start(batch, length, ids.device))
            behind = torch.arange(window, len(ids) + window, device=ids.device)
            if bool(((ids >= 0) & (ends > behind)).any()):
                raise ValueError(f"images of more tokens than the window of {window} are not supported here")
        ids = self.ids.to(torch.int64)
        return ids[:, None, :, None] if self.is_packed else ids[:, None, None]


def _carried_start(batch: int, length: int, device: torch.device) -> Tensor:
    """Return row offsets [S + 1] of the sequences of the forward that runs now: blocks of two of them may stand side by
    side."""
    now = carried() or {}
    step, packed = now.get(STEP_KEYWORD), now.get(PACKING)
    if isinstance(step, StepContext):
        return step.paged.query_start
    if isinstance(packed, Tensor) and batch == 1:
        return packed.to(device=device, dtype=torch.int32)
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _leaves(function: object) -> Iterator[object]:
    """Yield the functions that a mask's function combines, of all depths."""
    inner = _held(function, "remap_positions_for_packed_sequence").get("mask_function")
    parts = _parts(function, "or_masks") or _parts(function, "and_masks") or (() if inner is None else (inner,))
    for part in parts:
        yield from _leaves(part)
    if not parts:
        yield function


def _parts(function: object, maker: str) -> tuple[object, ...]:
    """Return the functions that a function of `maker` combines; none for any other function."""
    return cast(tuple[object, ...], _held(function, maker).get("mask_functions", ()))


def _held(function: object, maker: str) -> dict[str, object]:
    """Return what a function holds that a function of this name has made; nothing for any other function."""
    if not isinstance(function, FunctionType) or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
