"""The gated delta rule in chunks, as matrix products: the form that the backward pass differentiates.

The form is that of Yang, Kautz & Hatamizadeh 2024 ("Gated Delta Networks"), as transformers has it; with a decay per
channel, that of Kimi Linear (2025); without the correction, that of Dao & Gu 2024 (Mamba-2). Sequences of similar
length go together, filled up with zeros, which change no state. Letters: R rows, T tokens, B sequences, G key heads,
H heads, K key size, V value size, N chunks, c chunk size, D one decay or K of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
CHANNEL_CHUNK = 16  # with a decay per channel, the products of all pairs of a chunk are K times larger
BATCH_ROWS = 2048  # of sequences that go together, filled up; a longer one goes alone


def normalized(x: Tensor, eps: float | None) -> Tensor:
    """Divide x [..., K] by its length, sqrt(sum of squares + eps); None leaves it as it is."""
    return x if eps is None else x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def chunked_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, scale: float, eps: float | None,
    corrects: bool = True, wants_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute out [T, H, V] and the final state [H, K, V], in the inputs' dtype; differentiable.

    q, k [T, G, K], v [T, H, V], g [T, H] or [T, H, K], beta [T, H], initial [H, K, V], None for zeros. Heads of several
    sequences of T tokens, one sequence after another, are as the heads of one. wants_final: False returns None for the
    final state.
    """
    tokens, heads, _ = v.shape
    size = CHANNEL_CHUNK if g.dim() == 3 else min(CHUNK, _filled(tokens))
    num_chunks = max(-(-tokens // size), 1)

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
    # Unbound, not indexed: the gradient of each index would be as large as all chunks.
    by_chunk = zip(*(t.unbind(1) for t in (q, k, qk, values, kept, values if reads is None else reads)), strict=True)
    for n, (query, key, pairs, new, keeps, read) in enumerate(by_chunk):
        if state is not None and reads is not None:
            new = new - read @ state
        outs.append(pairs @ new if state is None else query @ state + pairs @ new)
        if wants_final or n + 1 < num_chunks:
            added = key.mT @ new
            state = added if state is None else state * keeps + added
    out = torch.stack(outs, 1)
    return out.movedim(0, 2).flatten(0, 1)[:tokens], state if wants_final else None


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of all sequences in groups, each of sequences that fill equal numbers of rows."""
    groups: list[list[int]] = []
    rows = -1
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if _filled(lengths[index]) != rows or (len(groups[-1]) + 1) * rows > BATCH_ROWS:
            rows = _filled(lengths[index])
            groups.append([])
        groups[-1].append(index)
    return groups


def _filled(tokens: int) -> int:
    """Round up to a whole number of chunks, or of quarters of one."""
    size = CHUNK if tokens > CHUNK else CHUNK // 4
    return max(-(-tokens // size), 1) * size


class SequencesSideBySide:
    """Some sequences of packed rows with their heads side by side: [T, B * H, ...], as the chunk form takes them."""

    def __init__(self, starts: Sequence[int], group: Sequence[int], device: torch.device) -> None:
        """Gather the rows.

        starts: the rows at which sequences start, and their number. group: indices of B sequences.
        """
        first, end = (torch.tensor([starts[index + i] for index in group], device=device) for i in (0, 1))
        rows = first + torch.arange(int((end - first).max()), device=device)[:, None]  # [T, B]
        self._is_row, self._num_sequences = rows < end, len(group)
        self._rows = rows[self._is_row]

    def stand(self, x: Tensor) -> Tensor:
        """Return x [R, H, ...] of these sequences as [T, B * H, ...], filled up with zeros."""
        out = x.new_zeros(*self._is_row.shape, *x.shape[1:])
        out[self._is_row] = x[self._rows]
        return out.flatten(1, 2)

    def put_back(self, found: Tensor, out: Tensor) -> None:
        """Write found [T, B * H, ...] to these sequences' rows of out [R, H, ...]."""
        out[self._rows] = found.unflatten(1, (self._num_sequences, -1))[self._is_row].to(out.dtype)


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
