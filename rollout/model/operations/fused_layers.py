"""Parts of a hosted module that one of our kernels can compute in one pass: norms, gated MLPs, rotary embedding.

A part is recognised by its results, not by its name: its code runs on a trial input, and the kernel replaces it only if
the bits equal those of the kernel's definition. A part that is not recognised keeps its own code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers import activations

from ....kernels.layers.rms_norm import NormRule, reference_rms_norm
from ....kernels.layers.rotary import reference_rotary, rotary
from ....kernels.layers.swiglu import swiglu
from ....kernels.linear.linear import Layer
from . import deferred
from .copied_code import innermost, with_names
from .deferred import DeferredSum, Rotation, plain
from .functions import outside_modes

Forward = Callable[..., object]

hosted_swiglu, _rotary = outside_modes(swiglu), outside_modes(rotary)

_CAPTURE = "transformers.utils.output_capturing"
_ROTARY = "apply_rotary_pos_emb"  # the global name by which transformers' attention modules call it
_SILU = (nn.SiLU, activations.SiLUActivation)
_NORM_RULES = ((0.0, True), (0.0, False), (1.0, False))  # weight_offset, round_first: Llama, gpt-oss, Gemma
_DTYPES = (torch.float32, torch.bfloat16)
# Errors that code of another form raises on the trial's stand-ins. It then counts as not recognised.
_UNLIKE = (AttributeError, TypeError, ValueError, RuntimeError, IndexError)


Hook = TypeVar("Hook", bound=Callable[..., object])
Gated = Callable[[Tensor, Layer, Layer], Tensor]  # x [...,K], gate, up -> silu(gate) * up [...,N]


def fused_forward(
    module: nn.Module, is_plain: Callable[[nn.Module], bool] = lambda _: False, gated: Gated | None = None
) -> Forward | None:
    """Return a replacement for the module's forward, or None. It reads the module's parameters and calls its children
    at every call.

    is_plain: whether a child is a linear layer that computes the product of `gated` and nothing else. Without gradients
    and hooks, the replacement computes such children with `gated`.
    """
    if "forward" in vars(module):
        return None
    return _norm_forward(module) or _gated_mlp_forward(module, is_plain, gated) or _attention_forward(module)


def _norm_forward(module: nn.Module) -> Forward | None:
    parameters = dict(module.named_parameters(recurse=False))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or any(True for _ in module.children()):
        return None
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    eps = getattr(module, name, None)
    if not isinstance(eps, float):
        return None
    rule = _norm_rule(cast(Hashable, type(module)), type(module).forward, eps)
    if rule is None:
        return None
    own = module.forward

    def forward(hidden_states: Tensor) -> Tensor:
        weight, eps_now = module.weight, getattr(module, name)
        if weight.dtype is not hidden_states.dtype:
            return own(plain(hidden_states))
        its_rule = rule if eps_now == rule.eps else replace(rule, eps=eps_now)
        if isinstance(hidden_states, DeferredSum):
            return hidden_states.normed(weight, its_rule)
        return deferred.norm(plain(hidden_states), weight, its_rule)

    return outside_modes(forward, takes_deferred=True)


@cache
def _norm_rule(kind: type[nn.Module], own: Forward, eps: float) -> NormRule | None:
    """Return the rule that gives the bits of `kind`'s forward, `own`, on a trial input. It has tiny numbers, so eps
    matters."""
    if _parameters_of(own) != 2:
        return None
    generator = torch.Generator().manual_seed(0)
    rules = [NormRule(eps, offset, first) for offset, first in _NORM_RULES]
    for dtype in _DTYPES:
        stand_in = kind.__new__(kind)
        nn.Module.__init__(stand_in)
        weight = torch.randn(48, generator=generator, dtype=torch.float32).to(dtype)
        stand_in.weight = nn.Parameter(weight, requires_grad=False)
        for name in ("variance_epsilon", "eps"):
            setattr(stand_in, name, eps)
        sizes = torch.tensor([1e-3, 1.0, 30.0], dtype=torch.float32)
        x = torch.randn(3, 5, 48, generator=generator, dtype=torch.float32) * sizes[:, None, None]
        x = x.to(dtype)
        try:
            found = own(stand_in, x)
        except _UNLIKE:
            return None
        rules = [rule for rule in rules if _same(found, reference_rms_norm(x, weight, rule))]
    # In float32 the place of the rounding changes nothing; in bfloat16 exactly one rule is left.
    return rules[0] if len(rules) == 1 else None


def _gated_mlp_forward(module: nn.Module, is_plain: Callable[[nn.Module], bool], gated: Gated | None) -> Forward | None:
    if not is_gated_mlp(module):
        return None
    mlp: Any = module  # its children are looked up at every call
    own = module.forward

    @outside_modes
    def in_one_product(hidden_states: Tensor, layers: tuple[Any, ...]) -> Tensor | None:
        if gated is None or not all(map(is_plain, layers)) or has_hooks(layers) or needs_grad(hidden_states, layers):
            return None
        gate, up = layers
        return gated(hidden_states, (gate.weight, gate.bias), (up.weight, up.bias))

    def forward(hidden_states: Tensor) -> Tensor:
        if may_change((mlp.act_fn,)):
            return cast(Tensor, own(hidden_states))  # the same bits: see `silu_as_gated`
        layers = mlp.gate_proj, mlp.up_proj
        hidden = in_one_product(hidden_states, layers)
        if hidden is None:
            hidden = hosted_swiglu(*(layer(hidden_states) for layer in layers))
        return mlp.down_proj(hidden)

    return forward


def silu_as_gated(x: Tensor) -> Tensor:
    """Compute silu with the bits that it has within `swiglu`: for activations that are called because of a hook. The
    trainer's model may have hooks that the engine's has not, as DeepSpeed's stage 3 has on every module."""
    return swiglu(x, torch.ones_like(x))


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether the module's forward is down_proj(silu(gate_proj(x)) * up_proj(x)), whatever its products are."""
    children = dict(module.named_children())
    if set(children) != {"gate_proj", "up_proj", "down_proj", "act_fn"} or list(module.parameters(recurse=False)):
        return False
    return type(children["act_fn"]) in _SILU and _is_gated_mlp(type(module).forward)


def gates_by_halves(experts: nn.Module) -> bool:
    """Return whether the gate of an experts module is silu of the first half of its columns times the second half."""
    gate = getattr(type(experts), "_apply_gate", None)
    is_its_class = callable(gate) and "_apply_gate" not in vars(experts)
    return is_its_class and type(getattr(experts, "act_fn", None)) in _SILU and _halves_gate(cast(Hashable, gate))


@cache
def _halves_gate(gate: Forward) -> bool:
    x = torch.arange(36, dtype=torch.float64).view(3, 12) / 7
    try:
        found = gate(SimpleNamespace(act_fn=torch.sin), x)
    except _UNLIKE:
        return False
    return _same(found, torch.sin(x[:, :6]) * x[:, 6:])


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether forward hooks are registered on any of the modules, or globally.

    The hooks that transformers leaves on layers once their hidden states, attentions or router logits were asked for
    do not count: they do nothing in a forward that asks for none.
    """
    return _has_global_hooks() or any(
        module._forward_pre_hooks or any(map(_sees, module._forward_hooks.values())) for module in modules
    )


def observing(hook: Hook) -> Hook:
    """Mark a hook that changes nothing and wants no result that is not computed without it."""
    hook.only_observes = True  # type: ignore[attr-defined]
    return hook


def may_change(modules: Iterable[nn.Module]) -> bool:
    """Return whether any of the modules has forward hooks that may change a weight, an input or a result, or torch
    calls some for all modules."""
    if _has_global_hooks():
        return True
    hooks = (hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    return any(_sees(hook) and not getattr(hook, "only_observes", False) for hook in hooks)


def _has_global_hooks() -> bool:
    """Return whether torch calls hooks for all modules."""
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)


def _sees(hook: object) -> bool:
    return getattr(hook, "__module__", None) != _CAPTURE


def needs_grad(x: Tensor, layers: Iterable[nn.Module]) -> bool:
    """Return whether autograd needs the layers' results on x."""
    needed = x.requires_grad or any(p.requires_grad for layer in layers for p in layer.parameters())
    return needed and torch.is_grad_enabled()


@cache
def _is_gated_mlp(forward: Forward) -> bool:
    """Return whether a class's forward is down(act(gate(x)) * up(x)) and reads only these four children."""
    if _parameters_of(forward) != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(6, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    stand_in = SimpleNamespace(
        gate_proj=lambda x: x @ gate, up_proj=lambda x: x @ up, down_proj=lambda x: x @ down, act_fn=torch.sin
    )
    x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    try:
        found = forward(stand_in, x)
    except _UNLIKE:
        return False
    return _same(found, (torch.sin(x @ gate) * (x @ up)) @ down)


def _attention_forward(module: nn.Module) -> Forward | None:
    """Return the module's own forward with our kernel under the name of the rotary function, or None."""
    forward = type(module).forward
    code = innermost(forward)
    if code is None or _ROTARY not in code.__code__.co_names:
        return None
    function = code.__globals__.get(_ROTARY)
    if not isinstance(function, types.FunctionType) or not _is_rotary(function):
        return None
    copy = with_names(forward, {_ROTARY: _rotary_of(function)})
    return copy and types.MethodType(copy, module)


def _rotary_of(function: Forward) -> Forward:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: object, **named: object
    ) -> object:
        with torch._C.DisableTorchFunction():  # a deferred tensor that is looked at would be computed
            # Some functions rotate a part of the head's width, or round to q's dtype at the end; no trial shows that.
            is_whole = not (others or named) and q.dim() == 4 and cos.dim() == 3 and not cos.requires_grad
            is_whole = is_whole and cos.shape[-1] == q.shape[-1] and cos.dtype is q.dtype
            waits = deferred.may_wait(q, k)
        if not is_whole:
            return function(q, k, cos, sin, *others, **named)
        if waits:
            return Rotation(q, k, cos, sin).deferred()
        return _rotary(q, k, cos, sin)

    return apply_rotary_pos_emb


@cache
def _is_rotary(function: Forward) -> bool:
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        query, key, cos, sin = (
            torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
            for shape in ((2, 4, 5, 16), (2, 2, 5, 16), (2, 5, 16), (2, 5, 16))
        )
        try:
            found = function(query, key, cos, sin)
        except _UNLIKE:
            return False
        expected = reference_rotary(query, key, cos, sin)
        if type(found) is not tuple or len(found) != 2 or not all(map(_same, found, expected)):
            return False
    return True


def _same(found: object, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)


def _parameters_of(function: Forward) -> int:
    return len(inspect.signature(function).parameters)
