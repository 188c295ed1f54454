"""Install and remove the invariant operations of a module's forward (docs/architecture.md, "Numerics").

Linear layers and activations get a forward of their own while the numerics are installed; modules that call functions
on weights they own (routers, experts) run under a mode that redirects those functions. The trainer's forward and the
rollout's run the same operations, so their numbers have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import activations

from ...kernels.layers.activation import gelu, gelu_tanh, sigmoid, silu
from ...kernels.linear.linear import Product, invariant_linear, product_of
from ...kernels.self_test import Guarantee, self_test
from ..sharding.collectives import RowReduction, VocabularyLookup, gather_columns
from ..sharding.division import Division
from ..sharding.tp_plan import SUMS
from .experts import REDUCTION
from .fused_layers import fused_forward
from .shared_input import SharedInput, siblings_of

_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.SiLU: silu,
    activations.SiLUActivation: silu,
    activations.GELUTanh: gelu_tanh,
    activations.GELUActivation: gelu,
}
_OWN_ROWS = (nn.Embedding,)  # have a matrix, but only look rows up


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return gelu_tanh(x) if approximate == "tanh" else gelu(x)


class ReplacedFunctions(TorchFunctionMode):
    """A mode that replaces functions by their entries in a table while it is active."""

    def __init__(self, table: Mapping[Callable[..., object], Callable[..., object]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        return self._table.get(func, func)(*args, **(kwargs or {}))


def invariant_functions(linear: Callable[..., Tensor]) -> ReplacedFunctions:
    """Return a mode that replaces functions that are not row-invariant by invariant ones."""
    return ReplacedFunctions(
        {
            F.linear: linear,
            F.silu: lambda x, inplace=False: silu(x),
            F.gelu: _gelu,
            F.sigmoid: sigmoid,
            torch.sigmoid: sigmoid,
            Tensor.sigmoid: sigmoid,
        }
    )


class Numerics:
    """The operations of one module, chosen by this processor's self-test and by the module's division.

    `with numerics.installed():` is re-entrant; when the outermost ends, every forward is restored.
    """

    def __init__(self, module: nn.Module, invariant: bool, division: Division) -> None:
        parameter = next(module.parameters())
        self.guarantee: Guarantee | None = None
        self._patches: list[tuple[nn.Module, str, object]] = []  # instance attributes, forward mostly, while installed
        self._depth = 0
        if invariant:
            shapes = division.linear_shapes
            self.guarantee = self_test(shapes, parameter.dtype, parameter.device, cuts=division.cuts)
            _refuse_other_products(module, parameter, self.guarantee)
        self._plan_shared(module, division)
        if self.guarantee is not None:
            self._plan_invariant(module, self.guarantee)

    def describe(self) -> str:
        """Return one line for people: the guarantee and its operations."""
        return self.guarantee.reason if self.guarantee else "invariant mode is off: numbers may depend on the batch"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the module with these operations. Changes only instance attributes, and restores them."""
        if self._depth == 0:
            hooked = [module for module, name, _ in self._patches if name in vars(module)]
            if hooked:
                names = sorted({type(module).__name__ for module in hooked})
                raise ValueError(f"modules with a forward of their own cannot be hosted: {', '.join(names)}")
            for module, name, value in self._patches:
                setattr(module, name, value)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                for module, name, _ in self._patches:
                    delattr(module, name)

    def _plan_shared(self, root: nn.Module, division: Division) -> None:
        """Plan the forwards of layers that several ranks share, or that sum K-blocks as if ranks shared them."""
        mesh, in_order = division.mesh, self.guarantee is not None
        num_blocks = division.k_blocks // mesh.tp if in_order else 1
        reduction = RowReduction(in_order, num_blocks, mesh.tp, mesh.tp_group)
        if mesh.tp == 1 and num_blocks == 1:
            return
        linear, product = self._linear(), self._product()
        for name, module in root.named_modules():
            role = division.roles[name]
            if role == "experts":
                self._patches.append((module, REDUCTION, reduction))
            elif role in SUMS and type(module) is nn.Linear:
                if mesh.tp == 1:
                    forward = _linear_forward(module, partial(linear, num_blocks=num_blocks))
                else:
                    forward = _row_forward(module, product, reduction, mesh.tp_rank if role == "row_split" else None)
                self._patches.append((module, "forward", forward))
            elif role == "column_gather" and division.holds_part(f"{name}.weight"):
                forward = _gathering_forward(_linear_forward(module, linear), division)
                self._patches.append((module, "forward", forward))
            elif role == "embedding" and division.holds_part(f"{name}.weight"):
                assert mesh.tp_group is not None
                first = division.shards[f"{name}.weight"].ranges[0][0]
                functions = ReplacedFunctions({F.embedding: VocabularyLookup(first, mesh.tp_group)})
                self._patches.append((module, "forward", _under(functions, module)))

    def _plan_invariant(self, root: nn.Module, guarantee: Guarantee) -> None:
        functions = invariant_functions(self._linear())
        planned = {id(module) for module, name, _ in self._patches if name == "forward"}
        divided = frozenset(planned)

        def is_native(module: nn.Module) -> bool:
            return guarantee.linear == "native" and type(module) is nn.Linear and id(module) not in divided

        if guarantee.linear == "native":
            for layers in (found for parent in root.modules() for found in siblings_of(parent)):
                if planned.isdisjoint(map(id, layers)):
                    shared = SharedInput(layers, self._linear())
                    self._patches += [(layer, "forward", shared.forward_of(i)) for i, layer in enumerate(layers)]
                    planned.update(map(id, layers))
        for module in root.modules():
            if id(module) in planned:
                continue
            forward: object = None
            if type(module) is nn.Linear:
                forward = _linear_forward(module, self._linear())
            elif type(module) in _ACTIVATIONS:
                forward = _ACTIVATIONS[type(module)]
            elif (fused := fused_forward(module, is_native)) is not None:
                forward = fused
            elif _is_activation(module) or (_owns_matrix(module) and not isinstance(module, _OWN_ROWS)):
                forward = _under(functions, module)
            if forward is not None:
                self._patches.append((module, "forward", forward))

    def _linear(self) -> Callable[..., Tensor]:
        if self.guarantee is None:
            return F.linear
        return partial(invariant_linear, method=self.guarantee.linear, row_multiple=self.guarantee.row_multiple)

    def _product(self) -> Product:
        return product_of(self.guarantee.linear, self.guarantee.row_multiple) if self.guarantee else F.linear


def _refuse_other_products(root: nn.Module, parameter: Tensor, guarantee: Guarantee) -> None:
    """Raise ValueError if layers of a second dtype, adapters in float32 for instance, need another product."""
    shapes: dict[torch.dtype, set[tuple[int, int]]] = {}
    for module in root.modules():
        if type(module) is nn.Linear and module.weight.dtype is not parameter.dtype:
            shapes.setdefault(module.weight.dtype, set()).add((module.out_features, module.in_features))
    for dtype, found in shapes.items():
        other = self_test(found, dtype, parameter.device)
        if (other.linear, other.row_multiple) != (guarantee.linear, guarantee.row_multiple):
            raise ValueError(
                f"{len(found)} shapes of layers in {dtype} need another product here ({other.choices}) than those in "
                f"{parameter.dtype} ({guarantee.choices}): give all one dtype (autocast_adapter_dtype=False for PEFT)"
            )


def _linear_forward(module: nn.Linear, linear: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, module.weight, module.bias)


def _row_forward(
    module: nn.Linear, product: Product, reduction: RowReduction, part: int | None
) -> Callable[[Tensor], Tensor]:
    """Return a forward that sums partial products over ranks.

    part: this rank's part of the inputs if every rank has them whole; None if a rank has its own part only.
    """

    def forward(x: Tensor) -> Tensor:
        mine = x if part is None else x.chunk(reduction.tp, dim=-1)[part]
        out = reduction.product(mine.reshape(-1, mine.shape[-1]), module.weight, module.bias, product)
        return out.view(*x.shape[:-1], -1)

    return forward


def _gathering_forward(forward: Callable[[Tensor], Tensor], division: Division) -> Callable[[Tensor], Tensor]:
    mesh = division.mesh
    return lambda x: gather_columns(forward(x), mesh.tp, mesh.tp_group)


def _under(functions: ReplacedFunctions, module: nn.Module) -> Callable[..., object]:
    forward = module.forward  # bound to the class's method: the patch is an instance attribute

    def run(*args: object, **kwargs: object) -> object:
        with functions:
            return forward(*args, **kwargs)

    return run


def _is_activation(module: nn.Module) -> bool:
    return type(module).__module__ in (activations.__name__, nn.modules.activation.__name__)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
