"""The operations of an encoder of images inside a hosted module: whole attention, and convolutions over patches.

An image's features may not depend on the images beside it: its attention is computed alone, and a convolution whose
windows do not overlap is a product of patches, whose rows keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..operations.products import Linear
from ..steps.masks import has_blocks

WHOLE = "lockstep_whole"  # attribute of an attention of an encoder, in which all rows of an image see each other


def whole_attention_parts(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the attention modules of the encoders beside a module's decoder."""
    decoder = getattr(root, "get_decoder", None)
    if not hasattr(getattr(root, "base_model", None), "get_image_features") or decoder is None:
        return
    of_decoder = set(map(id, decoder().modules()))
    if id(root) in of_decoder:
        return
    for part in root.modules():
        is_attention = getattr(part, "is_causal", None) is False or "attention" in type(part).__name__.lower()
        if id(part) not in of_decoder and is_attention:
            yield part


def whole_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None,
    is_causal: object = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend among all rows of each image -> ([B, Q, H, D], None). query [B, H, Q, D], key and value [B, K, T, D].

    Each batch row is a call of its own, so that its bits do not depend on the others, and so is each image that a mask
    [1, 1, T, T] separates from the others of a row. Where a mask [B, 1, 1 or Q, T] hides keys that pad an image, rows
    of the image are a call without these, so that their bits do not depend on how many they are. Rows of a causal
    attention, which `is_causal` or the module's attribute tells of as transformers reads them, see those before them,
    and all of a block by a mask that `has_blocks`. Raises ValueError for any other mask.
    """
    is_shared = query.shape[1] != key.shape[1]  # queries of several heads have one head of keys
    if mask is not None and mask.shape == (1, 1, 1, 1) and not mask.any():  # of no rows: it stands for none
        mask = None
    is_causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    if (is_causal and mask is None) or (mask is not None and has_blocks(mask)):
        return _attend_before(query, key, value, mask, scaling, is_shared), None
    found = []
    for index, one in enumerate(zip(query.split(1), key.split(1), value.split(1), strict=True)):
        calls = _calls_of(mask, index, query.shape[2], key.shape[2], query.device)
        if calls is None:
            raise ValueError(
                f"{type(module).__name__} of an encoder of images has a mask that neither separates images nor hides "
                "what pads them: not supported"
            )
        out = query.new_zeros(1, *query.shape[1:3], value.shape[-1])
        for rows, keys in calls:
            q, k, v = one[0][:, :, rows], one[1][:, :, keys], one[2][:, :, keys]
            out[:, :, rows] = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=is_shared)
        found.append(out)
    return torch.cat(found).transpose(1, 2).contiguous(), None


def _attend_before(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, is_shared: bool
) -> Tensor:
    """Attend to the rows before and, by a mask that `has_blocks`, to those of a row's block, batch row by batch row."""
    found = []
    for index, (q, k, v) in enumerate(zip(query.split(1), key.split(1), value.split(1), strict=True)):
        seen = None
        if mask is not None:
            ids = mask[index].flatten()
            seen = torch.ones(len(ids), len(ids), dtype=torch.bool, device=ids.device).tril()
            seen |= (ids == ids[:, None]) & (ids >= 0)
        found.append(
            F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scaling, enable_gqa=is_shared)
        )
    return torch.cat(found).transpose(1, 2).contiguous()


_Rows = slice | Tensor
_ALL = slice(None)


def _calls_of(
    mask: Tensor | None, index: int, num_rows: int, num_keys: int, device: torch.device
) -> list[tuple[_Rows, _Rows]] | None:
    """Return the rows, and the keys that they see, of each call for one batch row; None for a mask of another kind than
    `whole_attention` takes. A mask is true, or 0, where a row sees a key."""
    if mask is None:
        return [(_ALL, _ALL)]
    if mask.dim() != 4 or mask.shape[1] != 1:
        return None
    own = mask[index if len(mask) > 1 else 0, 0]
    seen = own if own.dtype is torch.bool else own == 0
    if seen.numel() and seen.all():
        return [(_ALL, _ALL)]
    if seen.numel() and seen.shape[1] == num_keys and bool((seen == seen[:1]).all()):
        real, padding = _rows_of(seen[0]), _rows_of(~seen[0])
        if not seen.any():
            return []
        return [(_ALL, real)] if num_rows != num_keys else [(real, real), (padding, real)]
    if seen.shape != (num_rows, num_rows) or num_keys != num_rows:
        return None
    begins = torch.ones(num_rows, dtype=torch.bool, device=device)
    begins[1:] = ~seen.diagonal(-1)
    number = begins.cumsum(0)
    if not torch.equal(seen, number[:, None] == number):
        return None
    ends = torch.bincount(number)[1:].cumsum(0).tolist()
    return [(rows, rows) for rows in map(slice, [0, *ends[:-1]], ends)]


def _rows_of(is_its: Tensor) -> _Rows:
    """Return the rows where a tensor is true, as a slice if they stand side by side."""
    rows = is_its.nonzero()[:, 0].tolist()
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=is_its.device)


def attention_of_each(own: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return F.multi_head_attention_forward (of nn.MultiheadAttention, as in a projector of images) that computes one
    batch row after the other: the library's bits depend on how many there are."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *args: Any,
        key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None, **named: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        if query.dim() < 3 or query.shape[1] < 2:
            return own(query, key, value, *args, **masks, **named)
        batch, found = query.shape[1], []
        for index in range(batch):
            if key_padding_mask is not None:
                masks["key_padding_mask"] = key_padding_mask[index : index + 1]
            if attn_mask is not None and attn_mask.dim() == 3:
                masks["attn_mask"] = attn_mask.chunk(batch)[index]
            rows = (t[:, index : index + 1] for t in (query, key, value))
            found.append(own(*rows, *args, **masks, **named))
        outs, weights = zip(*found, strict=True)
        return torch.cat(outs, 1), None if weights[0] is None else torch.cat(weights)

    return attend


def patch_convolution(linear: Linear, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution that is a product where its windows are patches that do not overlap, else torch's own of one
    image after the other: the library's bits depend on how many there are.

    linear: x [..., K], weight [N, K], bias [N] or None -> [..., N]. own: F.conv2d or F.conv3d.
    """

    def convolution(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        size = tuple(weight.shape[2:])
        are_patches = _each(stride, size) == size and _each(dilation, size) == (1,) * len(size) and groups == 1
        is_cut = padding == "valid" or (not isinstance(padding, str) and not any(_each(padding, size)))
        if not are_patches or not is_cut or x.dim() != weight.dim():
            others = (weight, bias, stride, padding, dilation, groups)
            if x.dim() != weight.dim() or not len(x):
                return own(x, *others)
            # Contiguous ones: the bits depend on the strides too, and those of one image say less.
            return torch.cat([own(one.contiguous(), *others) for one in x.split(1)])
        counts = [length // window for length, window in zip(x.shape[2:], size, strict=True)]
        for axis, (count, window) in enumerate(zip(counts, size, strict=True), start=2):
            x = x.narrow(axis, 0, count * window)  # as a convolution leaves out what fills no window
        shape = [n for pair in zip(counts, size, strict=True) for n in pair]
        x = x.reshape(*x.shape[:2], *shape)  # [B, C, count, window, ...]
        num = len(size)
        order = [0, *range(2, 2 + 2 * num, 2), 1, *range(3, 3 + 2 * num, 2)]
        out = linear(x.permute(order).flatten(1 + num), weight.flatten(1), bias)  # [B, counts, N]
        return out.movedim(-1, 1)

    return convolution


def _each(value: int | str | Sequence[int], size: tuple[int, ...]) -> tuple[int, ...]:
    assert not isinstance(value, str)
    return (value,) * len(size) if isinstance(value, int) else tuple(value)
