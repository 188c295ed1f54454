"""Functions of torch that a hosted module's own code calls, replaced while it runs.

A function whose result for a row may depend on the other rows is replaced by one that keeps a row's bits; a function
that draws random numbers is refused. Both are found by a mode around the module's forward. Our kernels run outside the
mode: it costs a microsecond for each call of torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...kernels.layers.activation import elu, gelu, gelu_tanh, mish, rsqrt, sigmoid, silu, softplus
from .products import Linear, replaced_products

Table = Mapping[Callable[..., object], Callable[..., object]]

_RANDOM = (
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm),
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, F.gumbel_softmax),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.random_, Tensor.uniform_, Tensor.normal_),
    *(Tensor.exponential_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
    *(F.rrelu, torch.rrelu),
)
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
)


class ReplacedFunctions(TorchFunctionMode):
    """A mode that replaces functions by their entries in a table while it is active."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self._inside = threading.local()  # .now: whether this thread is under the mode

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        return self._table.get(func, func)(*args, **(kwargs or {}))

    def around(self, forward: Callable[..., object]) -> Callable[..., object]:
        """Return the function under the mode, which is entered once however such functions are nested."""
        inside = self._inside

        def run(*args: object, **kwargs: object) -> object:
            if getattr(inside, "now", False):
                return forward(*args, **kwargs)
            inside.now = True
            try:
                with self:
                    return forward(*args, **kwargs)
            finally:
                inside.now = False

        return run


def invariant_functions(linear: Linear) -> ReplacedFunctions:
    """Return a mode that replaces functions that are not row-invariant, and refuses functions that are random.

    linear: x [...,K], weight [N,K], bias [N] or None -> [...,N], the invariant product.
    """
    return ReplacedFunctions(
        {
            **replaced_products(linear),
            **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.special.expit, Tensor.sigmoid), sigmoid),
            **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), rsqrt),
            F.silu: lambda x, inplace=False: silu(x),
            F.gelu: lambda x, approximate="none": gelu_tanh(x) if approximate == "tanh" else gelu(x),
            F.mish: lambda x, inplace=False: mish(x),
            F.elu: lambda x, alpha=1.0, inplace=False: elu(x, alpha),
            F.softplus: softplus,
            **{function: _refusing(function) for function in _RANDOM},
            **{function: _unless_off(function) for function in _DROPOUTS},
        }
    )


def outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which then runs without function modes: for our kernels, which need none."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _refusing(function: Callable[..., object]) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError(
            f"the module draws random numbers ({_name(function)}) in its forward, so the trainer's log-probabilities "
            "would differ from the engine's: switch that off, or call eval()"
        )

    return refuse


def _unless_off(function: Callable[..., Any]) -> Callable[..., object]:
    refuse = _refusing(function)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> object:
        return refuse() if training and p else x

    return dropout


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", str(function))
