"""Lightning attention (MiniMax-Text-01): linear attention in which each head forgets at a fixed rate.

S = exp(-slope) S + k v'; o = S'q: the recurrence of Mamba-2 with steps of one. The module's own code goes in blocks,
across the sequences of a packed row. A class is recognised by its attributes and by the results of its code on a small
trial layer. Letters: B batch, T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.recurrent.state_space import state_space, state_space_in_slots
from .delta_rule import UNLIKE
from .heads import UNDIVIDED, HeadDivision
from .rows import rows_of

Forward = Callable[..., Any]

_PARTS = ("qkv_proj", "output_gate", "norm", "out_proj", "slope_rate", "decay_factors")


def lightning_forward(module: nn.Module, division: HeadDivision = UNDIVIDED) -> Forward | None:
    """Return the forward of Lightning attention with its sequences' states; None for any other module."""
    if not hasattr(module, "layer_idx") or not all(hasattr(module, name) for name in _PARTS):
        return None
    kind: Any = type(module)
    if not _is_like(kind, kind.forward):
        return None
    return _forward_of(module, division)


def _forward_of(module: Any, division: HeadDivision) -> Forward:
    def forward(
        hidden_states: Tensor, position_embeddings: object = None, attention_mask: Tensor | None = None, **named: object
    ) -> tuple[Tensor, None]:
        # attention_mask [B, T], of padding: its rows leave nothing in the states
        qkv = module.act_fn(module.qkv_proj(hidden_states))
        if attention_mask is not None:
            qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
        out = _attended(module, qkv.unflatten(-1, (module.num_attention_heads, -1)), named, division)
        out = module.norm(out.to(qkv.dtype).flatten(-2))
        return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out), None

    return forward


def _attended(module: nn.Module, qkv: Tensor, named: dict[str, object], division: HeadDivision) -> Tensor:
    """Compute the recurrence of qkv [B, T, H, 3 D] -> [B, T, H, D], in fp32."""
    batch, num_rows, num_heads = qkv.shape[:3]
    rows = rows_of(module, batch, num_rows, qkv.device, named, spreads=True)
    q, k, v = qkv.flatten(0, 1).chunk(3, dim=-1)
    share = division.share(num_heads, num_heads)
    slope: Tensor = module.slope_rate  # type: ignore[assignment]  # a buffer [H, 1, 1]
    decay = -slope.flatten().to(torch.promote_types(slope.dtype, torch.float32))
    steps = decay.new_ones(()).expand(len(q), num_heads)
    if (slots := rows.slots("recurrent")) is not None:
        q, k, v, steps = (t[:, share.heads] for t in (q, k, v, steps))
        own = decay[share.heads]
        out = share.gathered(state_space_in_slots(v, steps, own, k, q, None, rows.cu_seqlens, slots))
    else:
        v, steps, k, q = rows.spread(v, steps, k, q)
        out, final = state_space(v, steps, decay, k, q, None, rows.cu_seqlens)
        rows.keep("recurrent", final[:, share.heads])
        out = rows.kept(out)
    return out.unflatten(0, (batch, num_rows))


# -- the trial ---------------------------------------------------------------------------------------------------------


@cache
def _is_like(kind: type[nn.Module], own: Forward) -> bool:
    """Return whether a class's forward `own` computes the same for a small layer: in blocks that its rows do not fill,
    and with padding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 11, 12, generator=generator, dtype=torch.float32)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 7:] = 0
    try:
        layer = _small(kind, generator)
        with torch.no_grad():
            for padding in (None, mask):
                found = own(layer, hidden_states=hidden, position_embeddings=None, attention_mask=padding)
                expected, _ = _forward_of(layer, UNDIVIDED)(hidden, attention_mask=padding)
                if type(found) is not tuple or not isinstance(found[0], Tensor) or found[0].shape != expected.shape:
                    return False
                if not torch.allclose(found[0], expected, atol=1e-5):
                    return False
    except UNLIKE:
        return False
    return True


def _small(kind: type[nn.Module], generator: torch.Generator) -> nn.Module:
    """Make a layer of a class with three heads of four channels, blocks of four rows, and random parameters."""
    num_heads, head_dim, hidden_size = 3, 4, 12
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.layer_idx, layer.num_attention_heads, layer.head_dim, layer.block_size = 0, num_heads, head_dim, 4
    width, linear = num_heads * head_dim, partial(nn.Linear, bias=False, dtype=torch.float32)
    layer.act_fn, layer.norm = nn.SiLU(), nn.LayerNorm(width, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        layer.qkv_proj, layer.output_gate = linear(hidden_size, 3 * width), linear(hidden_size, width)
        layer.out_proj = linear(width, hidden_size)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).normal_(generator=generator)
    layer.slope_rate = torch.rand(num_heads, 1, 1, generator=generator, dtype=torch.float32)
    layer.query_decay, layer.key_decay, layer.diagonal_decay = kind.decay_factors(layer, layer.slope_rate)  # type: ignore[attr-defined]
    return layer
