"""Mixture-of-experts layers in which a row does not depend on the other rows.

Registered with transformers' ExpertsInterface under the name `lockstep`. Each expert runs its rows through the same
row-invariant product as every other linear layer, and a row's experts are added in the order of its routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

from ..sharding.collectives import RowReduction

EXPERTS = "lockstep"
REDUCTION = "lockstep_reduction"  # attribute of an experts module: the RowReduction of its down projections


def hosted_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts with the signature of transformers' ExpertsInterface. Differentiable.

    hidden_states [N, D], top_k_index and top_k_weights [N, E]; returns [N, D]. Products call F.linear, which the
    installed numerics replace with the invariant product. Raises ValueError that names each unsupported feature.
    """
    unsupported = [name for name in ("has_post_expert_norm", "_is_expert_parallel") if getattr(module, name, False)]
    if unsupported:
        raise ValueError(f"{type(module).__name__} needs {', '.join(unsupported)}: not supported")
    reduction: RowReduction | None = getattr(module, REDUCTION, None)
    partials, biases = _partial_sums(module, hidden_states, top_k_index, top_k_weights, reduction)
    if reduction is None:
        return partials[0].to(hidden_states.dtype)
    return reduction.sum(torch.stack([p.to(hidden_states.dtype) for p in partials]), biases)


def _partial_sums(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, reduction: RowReduction | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return a sum [N, D] for each K-block of the down projections, and the sum of the biases or None.

    A sum adds each row's weighted experts in the order of its routing, so ranks exchange one sum a row and block, not
    one a route. Without a reduction: one block, biases included.
    """
    num_rows, num_routes = top_k_index.shape
    num_blocks = reduction.num_blocks if reduction else 1
    flat_index = top_k_index.reshape(-1)
    first, activate = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)
    activated = cast(Callable[[Tensor], Tensor], activate)
    places: list[Tensor] = []
    outputs: list[list[Tensor]] = [[] for _ in range(num_blocks)]
    biases: list[Tensor] = []
    for expert in torch.unique(flat_index).tolist():
        mine = torch.nonzero(flat_index == expert).squeeze(1)
        rows = hidden_states[mine // num_routes]
        gated = activated(_expert_linear(module, first, expert, rows))
        places.append(mine)
        if reduction is None:
            outputs[0].append(_expert_linear(module, "down_proj", expert, gated))
            continue
        width = gated.shape[1] // num_blocks
        for block, output in enumerate(outputs):
            part = slice(block * width, (block + 1) * width)
            output.append(F.linear(gated[:, part], _expert_weight(module, "down_proj", expert)[:, part]))
        if module.has_bias:
            biases.append(cast(Tensor, module.down_proj_bias)[expert].expand(len(mine), -1))
    order = torch.argsort(torch.cat(places))
    # A block's sum is rounded once, before it is sent: routes are added in fp32, or wider.
    weights = top_k_weights if reduction is None else top_k_weights.to(torch.promote_types(gated.dtype, torch.float32))
    weights = weights.unsqueeze(-1)

    def routed_sum(parts: list[Tensor]) -> Tensor:
        routed = torch.cat(parts)[order].view(num_rows, num_routes, -1) * weights
        total = routed[:, 0]
        for route in range(1, num_routes):  # left to right: the order does not depend on other rows
            total = total + routed[:, route]
        return total

    return [routed_sum(output) for output in outputs], routed_sum(biases) if biases else None


def _expert_weight(module: nn.Module, name: str, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    return weight.t() if module.is_transposed else weight


def _expert_linear(module: nn.Module, name: str, expert: int, rows: Tensor) -> Tensor:
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(rows, _expert_weight(module, name, expert), bias)


ExpertsInterface.register(EXPERTS, hosted_experts)
