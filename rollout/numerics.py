"""Puts the invariant operations under a module's forward, and takes them away again (DESIGN section 4).

Linear layers and activations get a forward of their own while the numerics are in force; modules that call functions on
weights they own (routers, experts) run under a mode that redirects those functions. The trainer's forward and the
rollout's run the same operations, so their numbers are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import activations

from ..kernels.activation import gelu, gelu_tanh, sigmoid, silu
from ..kernels.invariant import Guarantee, self_test
from ..kernels.linear import invariant_linear

_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: silu,
    activations.SiLUActivation: silu,
    activations.GELUTanh: gelu_tanh,
    activations.GELUActivation: gelu,
}
_OWN_ROWS = (nn.Embedding,)  # owns a matrix, but only looks rows up


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return gelu_tanh(x) if approximate == "tanh" else gelu(x)


class InvariantFunctions(TorchFunctionMode):
    """While active, the functions that are not row-invariant are replaced by those that are."""

    def __init__(self, linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self._table = {
            F.linear: linear,
            F.silu: lambda x, inplace=False: silu(x),
            F.gelu: _gelu,
            F.sigmoid: sigmoid,
            torch.sigmoid: sigmoid,
            Tensor.sigmoid: sigmoid,
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self._table.get(func, func)(*args, **(kwargs or {}))


class Numerics:
    """The operations a module runs with, as the self-test of this processor chose them.

    `with numerics.installed():` is re-entrant; on leaving the outermost, every forward is what it was.
    """

    def __init__(self, module: nn.Module, invariant: bool) -> None:
        parameter = next(module.parameters())
        self.guarantee: Guarantee | None = None
        self._patches: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._depth = 0
        if invariant:
            shapes = {tuple(m.weight.shape) for m in module.modules() if type(m) is nn.Linear}
            self.guarantee = self_test(sorted(shapes), parameter.dtype, parameter.device)
            self._plan(module, self.guarantee)

    def describe(self) -> str:
        """One line for people: what holds, and with which operations."""
        return self.guarantee.reason if self.guarantee else "invariant mode is off: numbers may depend on the batch"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the module with these operations. Changes only instance attributes, and restores them."""
        if self._depth == 0:
            hooked = [module for module, _ in self._patches if "forward" in vars(module)]
            if hooked:
                names = sorted({type(module).__name__ for module in hooked})
                raise ValueError(f"modules with a forward of their own cannot be hosted: {', '.join(names)}")
            for module, forward in self._patches:
                module.forward = forward  # type: ignore[method-assign]
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for module, _ in self._patches:
                    del module.forward

    def _plan(self, root: nn.Module, guarantee: Guarantee) -> None:
        linear = partial(invariant_linear, method=guarantee.linear, row_multiple=guarantee.row_multiple)
        functions = InvariantFunctions(linear)
        for module in root.modules():
            if type(module) is nn.Linear:
                self._patches.append((module, _linear_forward(module, linear)))
            elif type(module) in _ACTIVATIONS:
                self._patches.append((module, _ACTIVATIONS[type(module)]))
            elif _is_activation(module) or (_owns_matrix(module) and not isinstance(module, _OWN_ROWS)):
                self._patches.append((module, _under(functions, module)))


def _linear_forward(module: nn.Linear, linear: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, module.weight, module.bias)


def _under(functions: InvariantFunctions, module: nn.Module) -> Callable[..., object]:
    forward = module.forward  # bound to the class's method: the patch is an instance attribute

    def run(*args: object, **kwargs: object) -> object:
        with functions:
            return forward(*args, **kwargs)

    return run


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in (activations.__name__, nn.modules.activation.__name__)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
