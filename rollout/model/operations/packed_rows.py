"""The sequences of a trainer's forward: one a batch row, padded on the right, or several packed in one row."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import cast

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ..layer_probe import PROBING, MaskFunction
from .carried import needs_mask

# transformers' mask functions pass a 4-D attention mask on unchanged. This one means that the attention needs no mask.
NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.float32)
PACKED = torch.zeros(1, 1, 1, 0, dtype=torch.float32)  # mask of a packed row: needs cu_seq_lens_q
_newest = threading.local()  # position_ids that were found to be of whole rows, and their version
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
    if mask is not None and mask.shape[:3] == (1, 1, 1) and mask is not NO_MASK and not mask.any():
        mask = PACKED  # DeepSeek-V4's code makes masks longer by zeros
    if mask is not None and mask is not NO_MASK and mask is not PACKED:
        raise ValueError("a 4-D attention mask is not supported: attention is causal within each sequence")
    if mask is PACKED:
        raise ValueError(_STARTS_OVER)
    refuse_packed_positions(positions)
    return torch.arange(0, (batch + 1) * num_rows, num_rows, dtype=torch.int32, device=device)


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
    """Check the attention mask and return None in its place, or a marker of packed rows.

    The attention is causal per sequence, and rows after a sequence's end change no other row, so it needs no mask.
    attention_mask [B, T], true where a token is. In the start-up forward the probe gives a mask of its own. Raises
    ValueError for padding on the left, and for tokens of images that attend to each other both ways.
    """
    if mask_function is bidirectional_mask_function:  # of an encoder of images, whose attention refuses padding
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask[:, None, None]
    if (without := _without_blocks(mask_function)) is not None:
        mask_function, allow_is_causal_skip = without, not _is_packed(without)
    probe = PROBING.get()
    if probe is not None and attention_mask is None:
        return probe.mask_made(None if use_vmap else cast(MaskFunction | None, mask_function), local_size)
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError("attention_mask has padding before tokens: pad on the right")
    if allow_is_causal_skip and not needs_mask():
        return None
    # An indexer's model asks for a mask in any case; of packed rows the function is another one.
    return NO_MASK if mask_function is causal_mask_function else PACKED


# -- transformers' functions of masks ----------------------------------------------------------------------------------


def _without_blocks(function: object) -> Callable[..., Tensor | bool] | None:
    """Return the function of a mask in which blocks of tokens may see each other (Gemma 4), without these, if there are
    none; None for any other function. Raises ValueError if there are some."""
    parts = _parts(function, "or_masks")
    ids = _held(parts[1], "blockwise_overlay").get("block_sequence_ids") if len(parts) == 2 else None
    if not isinstance(ids, Tensor):
        return None
    if bool((ids >= 0).any()):
        raise ValueError("tokens of images attend to each other in both directions here: not supported")
    return cast(Callable[..., Tensor | bool], parts[0])


def _is_packed(function: object) -> bool:
    return any(_held(part, "packed_sequence_mask_function") for part in _parts(function, "and_masks"))


def _parts(function: object, maker: str) -> tuple[object, ...]:
    """Return the functions that a function of `maker` combines; none for any other function."""
    return cast(tuple[object, ...], _held(function, maker).get("mask_functions", ()))


def _held(function: object, maker: str) -> dict[str, object]:
    """Return what a function holds that a function of this name has made; nothing for any other function."""
    if not isinstance(function, FunctionType) or not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
