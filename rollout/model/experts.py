"""Mixture-of-experts layers in which a row does not depend on the other rows.

Registered with transformers' ExpertsInterface under the name `lockstep`. Each row goes through the same row-invariant
products as in every other linear layer, with the weights of its experts, which are added in the order of its routing.
On a CPU one native call computes all experts: it reads itself which are chosen, so a decode step can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

from ...kernels.linear.grouped import grouped_products
from ..sharding.collectives import RowReduction
from .operations.functions import outside_modes
from .operations.fused_layers import gates_by_halves, hosted_swiglu, needs_grad

EXPERTS = "lockstep"
REDUCTION = "lockstep_reduction"  # attribute of an experts module: the RowReduction of its down projections
NATIVE = "lockstep_native"  # attribute of an experts module whose products are native: all experts in one call

GroupedProduct = Callable[..., Tensor]  # x, experts, weights, biases -> one row a route, as `grouped_products`
_native_products = outside_modes(grouped_products)


def hosted_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts with the signature of transformers' ExpertsInterface. Differentiable.

    hidden_states [N, D], top_k_index and top_k_weights [N, E]; returns [N, D]. Products are native
    ones or call F.linear, which the installed numerics replace with the invariant product. Raises ValueError that names
    each unsupported feature.
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
    experts = top_k_index.reshape(-1).to(torch.int64)
    is_native = getattr(module, NATIVE, False) and not needs_grad(hidden_states, (module,))
    product = _native_products if is_native else _products_by_expert
    gated = _activated(module, hidden_states, experts, product)
    down, down_biases = _weights(module, "down_proj"), _biases(module, "down_proj")
    biases = None
    if reduction is None:
        outputs = [product(gated, experts, down, down_biases)]
    else:
        width = gated.shape[1] // reduction.num_blocks
        parts = [slice(start, start + width) for start in range(0, width * reduction.num_blocks, width)]
        outputs = [product(gated[:, part], experts, down[:, :, part], None) for part in parts]
        biases = None if down_biases is None else down_biases[experts]
    # A block's sum is rounded once, before it is sent: routes are added in fp32, or wider.
    weights = top_k_weights if reduction is None else top_k_weights.to(torch.promote_types(gated.dtype, torch.float32))
    weights = weights.unsqueeze(-1)

    def routed_sum(part: Tensor) -> Tensor:
        routed = part.view(num_rows, num_routes, -1) * weights
        total = routed[:, 0]
        for route in range(1, num_routes):  # left to right: the order does not depend on other rows
            total = total + routed[:, route]
        return total

    return [routed_sum(output) for output in outputs], None if biases is None else routed_sum(biases)


def _activated(module: nn.Module, rows: Tensor, experts: Tensor, product: GroupedProduct) -> Tensor:
    """Return the inputs of the down projections [R, I], one of each route."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    weights, biases = _weights(module, name), _biases(module, name)
    if module.has_gate and gates_by_halves(module):
        if product is _native_products and not module.is_transposed:
            return _native_products(rows, experts, weights, biases, gated=True)
        return hosted_swiglu(*product(rows, experts, weights, biases).chunk(2, dim=-1))
    activate = cast(Callable[[Tensor], Tensor], module._apply_gate if module.has_gate else module.act_fn)
    return activate(product(rows, experts, weights, biases))


def _products_by_expert(x: Tensor, experts: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """Compute what `grouped_products` does, expert by expert; differentiable."""
    repeats, chosen = len(experts) // len(x), torch.unique(experts).tolist()
    places = [torch.nonzero(experts == expert).squeeze(1) for expert in chosen]
    outputs = [
        F.linear(x[mine // repeats], weights[expert], None if biases is None else biases[expert])
        for expert, mine in zip(chosen, places, strict=True)
    ]
    return torch.cat(outputs)[torch.argsort(torch.cat(places))]


def _weights(module: nn.Module, name: str) -> Tensor:
    """Return the weights of all experts, [E, out, in]."""
    weights = cast(Tensor, getattr(module, name))
    return weights.transpose(1, 2) if module.is_transposed else weights


def _biases(module: nn.Module, name: str) -> Tensor | None:
    return cast(Tensor, getattr(module, f"{name}_bias")) if module.has_bias else None


ExpertsInterface.register(EXPERTS, hosted_experts)
