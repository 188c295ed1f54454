"""Scores of an indexer's keys on a GPU (Triton). `selection.py` has the definition.

A program scores a tile of keys for one row: products in fp32 of fixed shapes, and heads summed in a fixed tree. So a
score has the same bits whatever rows, keys and blocks are beside it. Letters as there, L positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED, early_launch, wait_for_inputs
from ..machine.triton_numbers import dot_added, widened

_KEYS, _DEPTH = 64, 16  # of a tile, and of the width that is multiplied at a time


def triton_scores(query: Tensor, weight: Tensor, scale: float, keys: Tensor, places: Tensor, counts: Tensor) -> Tensor:
    """Compute scores float32 [N, L]; -inf for keys from a row's count on, and the largest number's negative or inf in
    the place of -inf and NaN.

    query [N, H, D] and weight [N, H] float32, keys [slots, D], places int64 [N, L], counts int64 [N].
    """
    (num_rows, heads, width), length = query.shape, places.shape[1]
    scores = torch.empty(num_rows, length, dtype=torch.float32, device=query.device)
    if not scores.numel():
        return scores
    with torch.cuda.device_of(query):
        _score_kernel[(num_rows, triton.cdiv(length, _KEYS))](
            *(query.contiguous(), weight.contiguous(), keys, places, counts, scores, length, len(keys)),
            scale=scale, H=heads, D=width, H_PAD=max(16, triton.next_power_of_2(heads)), KEYS=_KEYS, DEPTH=_DEPTH,
            **early_launch(query.device), **UNFUSED,
        )  # fmt: skip
    return scores


_TENSORS = ["query", "weight", "keys", "places", "counts", "scores"]


@triton.jit(do_not_specialize=["length", "num_slots"], do_not_specialize_on_alignment=_TENSORS)
def _score_kernel(
    query, weight, keys, places, counts, scores, length, num_slots, scale,
    H: tl.constexpr, D: tl.constexpr, H_PAD: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Write the scores of KEYS positions of a row: scores [N, L]."""
    wait_for_inputs(IS_EARLY)
    row, position = tl.program_id(0).to(tl.int64), tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    count = tl.load(counts + row)
    is_seen, at = position < count, scores + row * length + position
    if tl.program_id(1) * KEYS >= count:
        tl.store(at, tl.full((KEYS,), float("-inf"), tl.float32), mask=position < length)
        return
    h = tl.arange(0, H_PAD)
    is_read = is_seen & (position < length)
    slot = tl.load(places + row * length + position, mask=is_read, other=0)
    slot = tl.minimum(tl.maximum(slot, 0), num_slots - 1)
    product = tl.zeros((KEYS, H_PAD), tl.float32)
    for first in range(0, D, DEPTH):
        d = first + tl.arange(0, DEPTH)
        of_query = (h[None, :] < H) & (d[:, None] < D)
        q = tl.load(query + (row * H + h[None, :]) * D + d[:, None], mask=of_query, other=0.0)  # [DEPTH, H]
        of_keys = is_read[:, None] & (d[None, :] < D)
        k = widened(tl.load(keys + slot[:, None] * D + d[None, :], mask=of_keys, other=0.0))  # [KEYS, DEPTH]
        product = dot_added(product, k, q)
    product = product * scale
    positive = tl.where((product > 0) | (product != product), product, 0.0)
    weights = tl.load(weight + row * H + h, mask=h < H, other=0.0)
    score = tl.sum(positive * weights[None, :], 1)
    score = tl.where(score != score, float("inf"), tl.maximum(score, -3.4028234663852886e38))
    tl.store(at, tl.where(is_seen, score, float("-inf")), mask=position < length)
