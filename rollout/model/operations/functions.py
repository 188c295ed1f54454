"""Functions of torch that a hosted module's own code calls, replaced while it runs.

A function whose result for a row may depend on the other rows is replaced by one that keeps a row's bits; a function
that draws random numbers is refused. Both are found by a mode around the module's forward. Our kernels run outside the
mode: it costs a microsecond for each call of torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ....kernels.layers.activation import celu, elu, gelu, gelu_tanh, glu, mish, rsqrt, selu, sigmoid, silu, softplus
from ....kernels.layers.embedding import embedding
from ....kernels.layers.powers import atan2, atanh, cosh, exp2, logaddexp, power, reduction, sinh
from ..encoders.vision import attention_of_each, patch_convolution
from . import deferred
from .indexer import Recorded
from .products import Linear, replaced_products
from .shared_queries import shared_query_attention

logger = logging.getLogger(__name__)

Table = Mapping[Callable[..., object], Callable[..., object]]

_AUTOCAST, _NOTHING = ("cpu", "cuda"), nullcontext()
_RANDOM = (
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm),
    *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, F.gumbel_softmax),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.random_, Tensor.uniform_, Tensor.normal_),
    *(Tensor.exponential_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_),
    *(F.rrelu, torch.rrelu, torch.rrelu_, torch.binomial, torch.native_dropout),
    *(torch._standard_gamma, torch._sample_dirichlet),  # which torch.distributions draw with
)
_SOFTMAXES = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)
_OF_ONE = ("exp2", "sinh", "cosh", "atanh")
_WITH_IN_PLACE = (
    *("sigmoid", "rsqrt", "pow", *_OF_ONE, "arctanh", "atan2", "arctan2", "elu", "celu", "selu"),
    *("addmm", "addmv", "baddbmm"),
)
_SETTERS = ("__setitem__", "__set__")
_OPERANDS: Mapping[object, tuple[str, ...]] = {  # names of operands in their order, where not "input" and "other"
    F.linear: ("input", "weight", "bias"),
    F.embedding: ("input", "weight"),
    **dict.fromkeys((torch.mv, Tensor.mv), ("input", "vec")),
    **dict.fromkeys((torch.addmv, Tensor.addmv, torch.addmv_, Tensor.addmv_), ("input", "mat", "vec")),
    **dict.fromkeys((Tensor.addmm_,), ("input", "mat1", "mat2")),
    **dict.fromkeys((Tensor.baddbmm_,), ("input", "batch1", "batch2")),
    torch.tensordot: ("a", "b"),
    torch.cdist: ("x1", "x2"),
    torch.linalg.multi_dot: (),
    F.bilinear: ("input1", "input2", "weight"),
    **dict.fromkeys((torch.mm, torch.bmm, Tensor.mm, Tensor.bmm), ("input", "mat2")),
    **dict.fromkeys((torch.addmm, Tensor.addmm), ("input", "mat1", "mat2")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), ("input", "batch1", "batch2")),
    torch.einsum: (),
    torch.polar: ("abs", "angle"),
}
_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    *(torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_),
)


class ReplacedFunctions(TorchFunctionMode):
    """A mode that replaces functions by their entries in a table while it is active."""

    def __init__(self, table: Table, *, defers: bool = False) -> None:
        """Make a mode of the table.

        defers: whether its functions return deferred tensors, whose operands must not change before they are read.
        """
        super().__init__()
        self._table, self._defers = table, defers
        self._inside = threading.local()  # .now: whether this thread is under the mode

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if self._defers and deferred.is_any_waiting() and _changes_its_operand(func, kwargs or {}):
            deferred.compute_all()
        replacement = self._table.get(func)
        if replacement is None or (types and any(issubclass(kind, Recorded) for kind in types)):
            return func(*args, **(kwargs or {}))
        return _called(replacement, func, args, kwargs) if kwargs else replacement(*args)

    def around(self, forward: Callable[..., object]) -> Callable[..., object]:
        """Return the function under the mode, which is entered once however such functions are nested."""
        inside = self._inside

        def run(*args: object, **kwargs: object) -> object:
            if getattr(inside, "now", False):
                return forward(*args, **kwargs)
            inside.now = True
            try:
                with self, without_autocast(tells=True), deferred.in_forward() if self._defers else _NOTHING:
                    result = forward(*args, **kwargs)
                if not self._defers:
                    return result
                result = deferred.plain(result)
                deferred.compute_all()  # what a hook has kept: its operands, weights among them, may change from now on
                return result
            finally:
                inside.now = False

        return run


def without_autocast(*, tells: bool = False) -> AbstractContextManager[object]:
    """Return a context without the caller's autocast, in which the module computes in the types of its weights. Engine
    and trainer would have other bits otherwise. tells: whether to log, once, that autocast has no effect."""
    devices = [device for device in _AUTOCAST if torch.is_autocast_enabled(device)]
    if not devices:
        return _NOTHING
    if tells:
        _tell_of_autocast()
    off = ExitStack()
    for device in devices:
        off.enter_context(torch.autocast(device, enabled=False))
    return off


@cache
def _tell_of_autocast() -> None:
    logger.warning(
        "autocast has no effect inside the numerics of an engine: the module computes in the types of its weights, as "
        "the engine does; give it bfloat16 weights to compute in bfloat16"
    )


def invariant_functions(
    linear: Linear, *, defers: bool = False, is_training: Callable[[], bool] = lambda: True
) -> ReplacedFunctions:
    """Return a mode that replaces functions that are not row-invariant, and refuses functions that are random.

    linear: x [...,K], weight [N,K], bias [N] or None -> [...,N], the invariant product. defers: whether sums wait for
    the norm that may follow (`deferred.py`), as on a GPU, where gradients of embeddings are added in order too.
    is_training: whether a part of the module is in train mode, so that eval() may end the draws.
    """
    table: dict[Callable[..., object], Callable[..., Any]] = {
        **replaced_products(linear),
        **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.special.expit, Tensor.sigmoid), sigmoid),
        **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), rsqrt),
        **(dict.fromkeys((torch.add, Tensor.add, Tensor.__add__), deferred.add) if defers else {}),
        **({F.embedding: embedding} if defers else {}),
        F.scaled_dot_product_attention: shared_query_attention(linear),
        F.multi_head_attention_forward: attention_of_each(F.multi_head_attention_forward),
        F.conv2d: patch_convolution(linear, F.conv2d),
        F.conv3d: patch_convolution(linear, F.conv3d),
        **_by_place((torch.pow, Tensor.pow, Tensor.__pow__), power),
        Tensor.__rpow__: lambda x, other: power(other, x),
        **_by_place((torch.exp2, torch.special.exp2, Tensor.exp2), exp2),
        **_by_place((torch.sinh, Tensor.sinh), sinh),
        **_by_place((torch.cosh, Tensor.cosh), cosh),
        **_by_place((torch.atanh, torch.arctanh, Tensor.atanh, Tensor.arctanh), atanh),
        **_by_place((torch.atan2, torch.arctan2, Tensor.atan2, Tensor.arctan2), atan2),
        **_by_place((torch.logaddexp, Tensor.logaddexp), logaddexp),
        **{function: reduction(function) for function in (torch.sum, torch.mean, Tensor.sum, Tensor.mean)},
        F.silu: lambda x, inplace=False: _written(silu, inplace, x),
        F.gelu: lambda x, approximate="none": gelu_tanh(x) if approximate == "tanh" else gelu(x),
        F.mish: lambda x, inplace=False: _written(mish, inplace, x),
        F.elu: lambda x, alpha=1.0, inplace=False: _written(elu, inplace, x, alpha),
        **dict.fromkeys((F.celu, torch.celu), lambda x, alpha=1.0, inplace=False: _written(celu, inplace, x, alpha)),
        **dict.fromkeys((F.selu, torch.selu), lambda x, inplace=False: _written(selu, inplace, x)),
        F.glu: glu,
        **{softmax: _along_last(softmax) for softmax in _SOFTMAXES},
        F.softplus: softplus,
        # Rotations, by which queries are multiplied: complex products of strided numbers have other bits.
        torch.polar: lambda size, angle: torch.polar(size, angle).contiguous(),
        **{function: _refusing(function, is_training) for function in _RANDOM},
        **{function: _unless_off(function, is_training) for function in _DROPOUTS},
    }
    return ReplacedFunctions({**table, **_operators(table), **_in_place(table)}, defers=defers)


def outside_modes(function: Callable[..., Any], *, takes_deferred: bool = False) -> Callable[..., Any]:
    """Return the function, which then runs without function modes: for our kernels, which need none.

    takes_deferred: whether it looks for deferred tensors itself; others get their values.
    """

    is_used = deferred.IS_USED  # looked at in every call: on a CPU this must cost nothing

    def run(*args: Any, **kwargs: Any) -> Any:
        if is_used and not takes_deferred:
            args, kwargs = deferred.plain(args), deferred.plain(kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _called(replacement: Callable[..., object], func: object, args: Sequence[Any], named: Mapping[str, Any]) -> object:
    """Call a replacement, with the operands that the caller has named in their places."""
    args, named = list(args), dict(named)
    for name in _OPERANDS.get(func, ("input", "other"))[len(args) :]:
        if name not in named:
            break
        args.append(named.pop(name))
    return replacement(*args, **named)


def _changes_its_operand(function: Callable[..., object], named: Mapping[str, Any]) -> bool:
    """Return whether a function of torch writes to a tensor: by its name (add_, __iadd__, __setitem__, copy_, the
    setter of data), by an argument (out, inplace), or by the schema of an operator."""
    if named.get("out") is not None or named.get("inplace"):
        return True
    if isinstance(function, torch._ops.OpOverload):
        return bool(function._schema.is_mutable)
    name = _name(function)
    return name.startswith("__i") or name in _SETTERS or (name.endswith("_") and not name.endswith("__"))


def _by_place(functions: Sequence[Callable[..., Any]], ours: Callable[..., Tensor]) -> Table:
    """Return a table in which ours takes the place of functions, unless these write to a tensor of the caller's."""

    def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            return ours(*args, **named) if named.get("out") is None else function(*args, **named)

        return run

    return {function: replaced(function) for function in functions}


def _operators(table: Table) -> Table:
    """Return a table of the operators of one operand that a module calls by torch.ops.aten."""
    found: dict[Callable[..., object], Callable[..., object]] = {}
    for function in (F.silu, F.mish, *(getattr(torch, name) for name in ("sigmoid", "rsqrt", *_OF_ONE))):
        packet = getattr(torch.ops.aten, _name(function))
        found |= dict.fromkeys((packet, packet.default), table[function])
    return found


def _in_place(table: Table) -> Table:
    """Return a table of functions that write to their first operand, such as Tensor.pow_, which is also **=. The result
    is that of the function of the same name without the underscore."""
    found: dict[Callable[..., object], Callable[..., object]] = {}
    for name in _WITH_IN_PLACE:
        owners = [owner for owner in (Tensor, torch, F) if hasattr(owner, name)]
        ours = next(table[getattr(owner, name)] for owner in owners if getattr(owner, name) in table)
        own = [getattr(owner, f"{name}_") for owner in (Tensor, torch, F) if hasattr(owner, f"{name}_")]
        found |= dict.fromkeys(own, partial(_written, ours, True))
    return found


def _written(ours: Callable[..., Any], inplace: bool, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Compute a function of ours; inplace: into its operand x."""
    if not inplace:
        return ours(x, *args, **named)
    if deferred.is_any_waiting():
        deferred.compute_all()  # sums that read the operand
    operand = x.clone() if torch.is_grad_enabled() and x.requires_grad else x  # a gradient may need what it held
    x.copy_(ours(operand, *args, **named))
    return x


def _along_last(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a softmax that moves its dimension to the end and back. Along another dimension than the last, PyTorch
    gives the numbers where a thread's share ends other bits. (log_softmax and sums along it do not depend on threads.)
    """

    def run(x: Tensor, dim: int | None = None, *args: Any, **named: Any) -> Tensor:
        if dim is None or dim in (-1, x.dim() - 1) or "out" in named:
            return softmax(x, dim, *args, **named)
        return softmax(x.movedim(dim, -1), -1, *args, **named).movedim(-1, dim)

    return run


def _refusing(function: Callable[..., object], is_training: Callable[[], bool]) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        mode = ": switch that off, or call eval()" if is_training() else ", in eval mode too: switch that off"
        raise ValueError(
            f"the module draws random numbers ({_name(function)}) in its forward, so the trainer's log-probabilities "
            f"would differ from the engine's{mode}"
        )

    return refuse


def _unless_off(function: Callable[..., Any], is_training: Callable[[], bool]) -> Callable[..., object]:
    refuse = _refusing(function, is_training)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> object:
        return refuse() if training and p else x

    return dropout


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", str(function))
