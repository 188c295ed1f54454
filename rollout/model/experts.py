"""Mixture-of-experts layers in which a row does not depend on the other rows.

Registered with transformers' ExpertsInterface under the name `lockstep`. Each row goes through the same row-invariant
products as in every other linear layer, with the weights of its experts, which are added in the order of its routing.
On a CPU one native call computes all experts, on a GPU one Triton kernel: they read themselves which are chosen, so a
decode step can be recorded.

Letters: M rows, R routes (M times the experts of a row), E experts, K in_features, N out_features of a product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

from ...kernels.linear.grouped import grouped_products
from ...kernels.self_test import Guarantee
from ..sharding.collectives import RowReduction
from .operations.functions import outside_modes
from .operations.fused_layers import gates_by_halves, hosted_swiglu, may_change, needs_grad

logger = logging.getLogger(__name__)

EXPERTS = "lockstep"
REDUCTION = "lockstep_reduction"  # attribute of an experts module: the RowReduction of its down projections
GROUPED = "lockstep_grouped"  # attribute of an experts module: the class of its routes, where all are one call


class Routes:
    """The routes of a call, int64 [R], with products expert by expert. They call F.linear, which the installed numerics
    replace with the invariant product. Differentiable."""

    can_gate = False

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """Look on the host how many routes each expert has."""
        self._order = torch.argsort(experts, stable=True)
        self._places = torch.argsort(self._order)  # of the routes, in that order
        self._counts: list[int] = torch.bincount(experts, minlength=num_experts).tolist()

    def product(self, x: Tensor, weights: Tensor, biases: Tensor | None, *, gated: bool = False) -> Tensor:
        """Multiply x [R / repeats,K] by each route's weight of weights [E,N,K], plus its bias of biases [E,N] -> [R,N].

        gated: the weights hold gates and then ups; compute silu(gate) * up [R,N / 2]. Where `can_gate`.
        """
        assert not gated
        rows = x[self._order // (len(self._order) // len(x))].split(self._counts)
        each = [None] * len(weights) if biases is None else biases.unbind()
        # Unbound, since the gradient of `weights[expert]` is as large as all weights.
        layers = zip(rows, weights.unbind(), each, strict=True)
        return torch.cat([F.linear(x, weight, bias) for x, weight, bias in layers if len(x)])[self._places]

    def total(self, outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the routes of each row, outputs [R,N] times weights [M,R / M] -> [M,N], in dtype."""
        routed = outputs.view(*weights.shape, -1) * weights.unsqueeze(-1)
        total = routed[:, 0]
        for route in range(1, weights.shape[1]):  # left to right: the order does not depend on other rows
            total = total + routed[:, route]
        return total.to(dtype)


class NativeRoutes(Routes):
    """Routes whose products are one call of the native product; without gradients."""

    can_gate = True
    _products = staticmethod(outside_modes(grouped_products))

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        self._experts = experts

    def product(self, x: Tensor, weights: Tensor, biases: Tensor | None, *, gated: bool = False) -> Tensor:
        return self._products(x, self._experts, weights, biases, gated=gated)


class TritonRoutes(Routes):
    """Routes whose products are one launch, and their sums another; without gradients."""

    can_gate = True

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        from ...kernels.linear import triton_grouped  # Triton is imported only where it is used

        listed = outside_modes(triton_grouped.Routes)(experts, num_experts)
        self.product = outside_modes(listed.product)  # type: ignore[method-assign]
        self._total = outside_modes(triton_grouped.routed_sum)

    def total(self, outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        if torch.float64 in (outputs.dtype, weights.dtype):
            return super().total(outputs, weights, dtype)
        return self._total(outputs, weights, dtype)


def is_experts(module: nn.Module) -> bool:
    """Return whether the module is one of transformers' ExpertsInterface."""
    return hasattr(module, "has_gate") and isinstance(getattr(module, "down_proj", None), Tensor)


def grouped_routes(module: nn.Module, guarantee: Guarantee) -> type[Routes] | None:
    """Return the class that computes all experts of an experts module in one call, with the bits of the guarantee's
    product, or None where each expert is a call of its own."""
    if guarantee.linear == "native":
        return NativeRoutes
    if guarantee.linear != "triton":
        return None
    from ...kernels.linear import triton_grouped

    down = _weights(module, "down_proj")
    for width in (_up_weights(module).shape[2], down.shape[2]):
        if difference := triton_grouped.first_difference(width, down.dtype, down.device):
            logger.warning("experts are computed one by one: %s", difference)
            return None
    return TritonRoutes


def hosted_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts with the signature of transformers' ExpertsInterface. Differentiable.

    hidden_states [M, D], top_k_index and top_k_weights [M, R / M]; returns [M, D]. Raises ValueError that names each
    unsupported feature.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"{type(module).__name__} needs _is_expert_parallel: not supported")
    kind: type[Routes] = Routes if needs_grad(hidden_states, (module,)) else getattr(module, GROUPED, Routes)
    experts = top_k_index.reshape(-1).to(torch.int64)
    routes = kind(experts, len(cast(Tensor, module.down_proj)))
    gated = _activated(module, hidden_states, routes)
    down, biases = _weights(module, "down_proj"), _biases(module, "down_proj")
    norm = cast(nn.Module, module.post_expert_norm) if getattr(module, "has_post_expert_norm", False) else None
    reduction: RowReduction | None = getattr(module, REDUCTION, None)
    if reduction is None:
        outputs = routes.product(gated, down, biases)
        return routes.total(outputs if norm is None else norm(outputs), top_k_weights, hidden_states.dtype)
    if norm is not None:
        raise ValueError(f"{type(module).__name__} normalises what an expert gives, which ranks hold in parts of a sum")
    # Ranks exchange one sum a row and K-block, not one a route. It is rounded once, before it is sent: routes are added
    # in fp32, or wider.
    wide = torch.promote_types(gated.dtype, torch.float32)
    weights, width = top_k_weights.to(wide), gated.shape[1] // reduction.num_blocks
    parts = [slice(start, start + width) for start in range(0, width * reduction.num_blocks, width)]
    partials = [
        routes.total(routes.product(gated[:, part], down[:, :, part], None), weights, hidden_states.dtype)
        for part in parts
    ]
    total_bias = None if biases is None else routes.total(biases[experts], weights, wide)
    return reduction.sum(torch.stack(partials), total_bias)


def _activated(module: nn.Module, rows: Tensor, routes: Routes) -> Tensor:
    """Return the inputs of the down projections [R, K], one of each route."""
    weights, biases = _up_weights(module), _biases(module, "gate_up_proj" if module.has_gate else "up_proj")
    if module.has_gate and gates_by_halves(module) and not may_change((cast(nn.Module, module.act_fn),)):
        if routes.can_gate and not module.is_transposed:
            return routes.product(rows, weights, biases, gated=True)
        return hosted_swiglu(*routes.product(rows, weights, biases).chunk(2, dim=-1))
    activate = cast(Callable[[Tensor], Tensor], module._apply_gate if module.has_gate else module.act_fn)
    return activate(routes.product(rows, weights, biases))


def _up_weights(module: nn.Module) -> Tensor:
    return _weights(module, "gate_up_proj" if module.has_gate else "up_proj")


def _weights(module: nn.Module, name: str) -> Tensor:
    """Return the weights of all experts, [E, out, in]."""
    weights = cast(Tensor, getattr(module, name))
    return weights.transpose(1, 2) if module.is_transposed else weights


def _biases(module: nn.Module, name: str) -> Tensor | None:
    return cast(Tensor, getattr(module, f"{name}_bias")) if module.has_bias else None


ExpertsInterface.register(EXPERTS, hosted_experts)
