"""The gated delta rule of one sequence in chunks, as matrix products: the form that the backward pass differentiates.

The form is that of Yang, Kautz & Hatamizadeh 2024 ("Gated Delta Networks"), as transformers has it; with a decay per
channel, that of Kimi Linear (2025). Letters: T tokens, G key heads, H heads, K key size, V value size, N chunks,
c chunk size, D one decay or K of them.
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, scale: float, eps: float | None
) -> tuple[Tensor, Tensor]:
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
    decay = chunks(g if g.dim() == 3 else g.unsqueeze(-1)).cumsum(2)  # [H, N, c, D]: logarithms from the chunk's start
    kk, qk = _pair_products(k * beta, k, decay), _pair_products(q, k, decay)
    # The values that the rule writes, less the parts that depend on the state before the chunk: `reads` @ state.
    both = torch.cat((v * beta, k * beta * decay.exp()), -1)
    values, reads = torch.linalg.solve_triangular(kk, both, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    q = q * decay.exp()
    k = k * (decay[:, :, -1:] - decay).exp()
    kept = decay[:, :, -1].exp().unsqueeze(-1)  # [H, N, D, 1]
    state, outs = initial, []
    for n in range(num_chunks):
        new = values[:, n] - reads[:, n] @ state
        outs.append(q[:, n] @ state + qk[:, n] @ new)
        state = state * kept[:, n] + k[:, n].mT @ new
    out = torch.stack(outs, 1) if outs else v
    return out.movedim(0, 2).flatten(0, 1)[:tokens], state


def _pair_products(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Return [H, N, c, c]: for i >= j, left_i . right_j with the decay from j to i; zero elsewhere."""
    size = decay.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1).unsqueeze(-1)
    between = (decay.unsqueeze(3) - decay.unsqueeze(2)).masked_fill(later, float("-inf")).exp()
    if decay.shape[-1] == 1:
        return (left @ right.mT) * between.squeeze(-1)
    return (left.unsqueeze(3) * right.unsqueeze(2) * between).sum(-1)
