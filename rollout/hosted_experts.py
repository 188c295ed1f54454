"""Mixture-of-experts layers whose rows do not depend on their neighbours.

Registered with transformers' ExpertsInterface under the name `lockstep`. Each expert runs the rows routed to it through
the same row-invariant product as every other linear layer, and a row's experts are added in the order of its routing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

EXPERTS = "lockstep"


def hosted_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts as transformers' ExpertsInterface calls them: hidden_states [N, D], top_k_index and top_k_weights
    [N, E]; returns [N, D]. Differentiable.

    Products go through F.linear, which the numerics in force turn into the invariant one. Raises ValueError naming what
    it does not support.
    """
    unsupported = [name for name in ("has_post_expert_norm", "_is_expert_parallel") if getattr(module, name, False)]
    if not module.has_gate:
        unsupported.append("experts without a gate")
    if unsupported:
        raise ValueError(f"{type(module).__name__} needs {', '.join(unsupported)}: not supported")
    num_rows, num_routes = top_k_index.shape
    flat_index = top_k_index.reshape(-1)
    places, outputs = [], []
    for expert in torch.unique(flat_index).tolist():
        mine = torch.nonzero(flat_index == expert).squeeze(1)
        rows = hidden_states[mine // num_routes]
        gated = module._apply_gate(_expert_linear(module, "gate_up_proj", expert, rows))
        outputs.append(_expert_linear(module, "down_proj", expert, gated))
        places.append(mine)
    routed = torch.cat(outputs)[torch.argsort(torch.cat(places))]
    routed = routed.view(num_rows, num_routes, -1) * top_k_weights.unsqueeze(-1)
    total = routed[:, 0]
    for route in range(1, num_routes):  # left to right: the same order whatever stands beside the row
        total = total + routed[:, route]
    return total.to(hidden_states.dtype)


def _expert_linear(module: nn.Module, name: str, expert: int, rows: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(rows, weight.t() if module.is_transposed else weight, bias)


ExpertsInterface.register(EXPERTS, hosted_experts)
