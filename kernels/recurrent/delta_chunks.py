"""The gated delta rule of one sequence in chunks, as matrix products: the form that the backward pass differentiates.

The form is that of Yang, Kautz & Hatamizadeh 2024 ("Gated Delta Networks"), as transformers has it; with a decay per
channel, that of Kimi Linear (2025); without the correction, that of Dao & Gu 2024 (Mamba-2). Letters: T tokens, G key
heads, H heads, K key size, V value size, N chunks, c chunk size, D one decay or K of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
CHANNEL_CHUNK = 16  # with a decay per channel, the products of all pairs of a chunk are K times larger


def normalized(x: Tensor, eps: float | None) -> Tensor:
    """Divide x [..., K] by its length, sqrt(sum of squares + eps); None leaves it as it is."""
    return x if eps is None else x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, scale: float, eps: float | None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute out [T, H, V] and the final state [H, K, V], in the inputs' dtype; differentiable.

    q, k [T, G, K], v [T, H, V], g [T, H] or [T, H, K], beta [T, H], initial [H, K, V].
    """
    tokens, heads, _ = v.shape
    size = CHUNK if g.dim() == 2 else CHANNEL_CHUNK
    num_chunks = -(-tokens // size)

    def chunks(x: Tensor) -> Tensor:
        """Cut x [T, H, ...] into chunks [H, N, c, ...], the last one filled with zeros."""
        filled = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, num_chunks * size - tokens))
        return filled.unflatten(0, (num_chunks, size)).movedim(2, 0)

    groups = heads // k.shape[1]
    q, k = (chunks(normalized(x, eps)).repeat_interleave(groups, 0) for x in (q, k))
    q, v, beta = q * scale, chunks(v), chunks(beta).unsqueeze(-1)
    g = chunks(g if g.dim() == 3 else g.unsqueeze(-1))  # [H, N, c, D]
    decay, between = g.cumsum(2).exp(), _decays_between(g)  # from the chunk's start, and from token to token
    qk = _pair_products(q, k, between)
    # The values that the rule writes, less the parts that depend on the state before the chunk: `reads` @ state.
    values, reads = v * beta, None
    if corrects:
        kk = _pair_products(k * beta, k, between)
        both = torch.cat((values, k * beta * decay), -1)
        values, reads = torch.linalg.solve_triangular(kk, both, upper=False, unitriangular=True).split(
            (v.shape[-1], k.shape[-1]), -1
        )
    q, k = q * decay, k * between[:, :, -1]
    kept = decay[:, :, -1].unsqueeze(-1)  # [H, N, D, 1]
    state, outs = initial, []
    for n in range(num_chunks):
        new = values[:, n] if reads is None else values[:, n] - reads[:, n] @ state
        outs.append(q[:, n] @ state + qk[:, n] @ new)
        state = state * kept[:, n] + k[:, n].mT @ new
    out = torch.stack(outs, 1) if outs else v
    return out.movedim(0, 2).flatten(0, 1)[:tokens], state


def _decays_between(g: Tensor) -> Tensor:
    """Return [H, N, c, c, D]: for i >= j, the decay after token j up to token i; zero elsewhere."""
    size = g.shape[2]
    earlier = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1).unsqueeze(-1)
    if g.shape[-1] == 1:
        # Not a difference of sums from the start, in which a long decay before token j leaves no digits.
        sums = (g.new_ones(size, size).tril() @ (g * earlier[..., 0])).unsqueeze(-1)
    else:
        from_start = g.cumsum(2)
        sums = from_start.unsqueeze(3) - from_start.unsqueeze(2)
    return sums.masked_fill(earlier.transpose(0, 1), float("-inf")).exp()


def _pair_products(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """Return [H, N, c, c]: for i >= j, left_i . right_j with the decay from j to i; zero elsewhere."""
    if between.shape[-1] == 1:
        return (left @ right.mT) * between.squeeze(-1)
    return (left.unsqueeze(3) * right.unsqueeze(2) * between).sum(-1)
