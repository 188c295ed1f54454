"""Draws of tokens from rows of logits on a GPU (Triton).

They follow the definition in reference.py bit for bit: its operations, in its order, unfused (UNFUSED). One pass over
all segments of the rows finds the winner of all tokens, and what its log-probability follows from (`triton_scan.py`).
Only where a row has filters is it read again, and only where they remove its winner drawn from again
(`triton_cut.py`). The launches are the same for all settings, so that a recorded graph serves any: the rows themselves
say in which of them there is something to do.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..machine.triton_launches import UNFUSED
from .triton_cut import VERDICT, draw_again
from .triton_logprobs import logprobs_of
from .triton_ranks import filter_weights
from .triton_scan import (
    BINS,
    COLUMNS,
    LEVELS,
    SIZES,
    Drawing,
    dense,
    folded_first,
    folded_statistics,
    folded_top,
    folded_winner,
    scaled_tile,
    scan,
    statistics,
    step_of,
    width_of,
)
from .wanted import wanted_logits

MOST_PASSES = 5  # over a row's logits


def draw(
    logits: Tensor,
    temperatures: Tensor,
    noise_keys: tuple[Tensor, Tensor],
    filters: tuple[Tensor, Tensor, Tensor],
    reshaped: tuple[Tensor, Tensor] | None,
    allowed: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens: int64 [R], their log-probabilities and chances float32 [R]; see `draws.draw_tokens`.

    noise_keys: seeds and positions, int64 [R]; filters: top_k int64, top_p float64, min_p float32 [R]. Does not wait
    for the device.
    """
    wanted = logits = dense(logits)
    if reshaped is not None or allowed is not None:
        wanted = wanted_logits(logits, reshaped, allowed)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs, chances = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if not num_rows:
        return token_ids, logprobs, chances
    bins = torch.empty(num_rows, LEVELS.value, 2, BINS.value, dtype=torch.int64, device=logits.device)
    top_k, top_p, min_p = (limit.contiguous() for limit in filters)
    seeds, positions = (key.contiguous() for key in noise_keys)
    drawing = Drawing(seeds, positions, top_k, top_p.double(), bins)
    parts = scan(wanted, temperatures, drawing)
    verdicts, scores = draw_again(wanted, temperatures, min_p, drawing, parts)
    with torch.cuda.device_of(logits):
        _choose_kernel[(num_rows,)](
            *(wanted, temperatures.contiguous(), vocab_size, wanted.stride(0), step_of(temperatures), top_k),
            *(parts, parts.shape[2], verdicts, scores, token_ids, logprobs, chances),
            WIDTH=width_of(parts), num_warps=1, **UNFUSED,
        )  # fmt: skip
    if wanted is not logits:  # a log-probability is the model's
        stats = statistics(logits, temperatures)
        logprobs = logprobs_of(logits, temperatures, stats, token_ids.unsqueeze(-1)).squeeze(-1)
    return token_ids, logprobs, chances


def weights(z: Tensor) -> Tensor:
    """Compute the filters' weights of float32 z [N], for a comparison with `reference.weights`."""
    out = torch.empty_like(z)
    with torch.cuda.device_of(z):
        _weights_kernel[(triton.cdiv(len(z), 1024),)](z.contiguous(), len(z), out, BLOCK=1024, **UNFUSED)
    return out


@triton.jit
def _weights_kernel(z_ptr, count, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, filter_weights(tl.load(z_ptr + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit(
    do_not_specialize=[*SIZES, "num_segments"], do_not_specialize_on_alignment=["logits_ptr", "top_k_ptr"]
)  # fmt: skip
def _choose_kernel(
    logits_ptr, temperatures_ptr, vocab_size, logits_row, temperature_step, top_k_ptr, parts_ptr, num_segments,
    verdicts_ptr, scores_ptr, ids_ptr, logprobs_ptr, chances_ptr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fold what the segments of a row found: its token, and the token's log-probability and chance."""
    r = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + r * temperature_step)
    parts = parts_ptr + r * COLUMNS * num_segments
    maximum, log_sum = folded_statistics(parts, num_segments, WIDTH)
    largest = folded_top(parts, num_segments, WIDTH)
    first = folded_first(parts, num_segments, largest, WIDTH)
    token = folded_winner(parts + 4 * num_segments, num_segments, WIDTH)
    if tl.load(verdicts_ptr + r * VERDICT) > 0:
        token = folded_winner(scores_ptr + r * 3 * num_segments, num_segments, WIDTH)
    token = tl.where(tl.load(top_k_ptr + r) == 1, first, token)
    token = tl.where(largest == largest, token, 0)
    logprob = scaled_tile(logits_ptr + r * logits_row, token, vocab_size, temperature) - maximum - log_sum
    tl.store(ids_ptr + r, token.to(tl.int64))
    tl.store(logprobs_ptr + r, logprob)
    tl.store(chances_ptr + r, tl.exp(logprob))
