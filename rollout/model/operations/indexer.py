"""Indexers, whose selection of keys is computed by the hosted attention (DeepSeek Sparse Attention).

An indexer's own code makes queries, keys and weights of heads, asks the cache for the keys of all tokens, scores them
and returns the best positions. The code runs as it is, but the cache gives an object in the place of the keys. It
records what the code does with them, and the result is an `IndexChoice`, which the module's code hands on to its
attention, or to those of later layers. Only there the places of all keys are known. Code that does anything else with
the keys is refused: each step of the score has to be the one that `kernels/attention/selection.py` computes.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....kernels.attention.selection import IndexQueries, SelectedKeys
from .copied_code import innermost

Forward = Callable[..., Any]

_CACHES = ("past_key_values", "cache")  # the parameter up to transformers 5.23, and since
_UPDATE = "update_indexer"  # the method of transformers' caches that returns the keys of all tokens
_ENTRIES = "index_topk"  # attribute of indexers of all kinds, also of those that a compressor has (`compressor.py`)


def is_indexer(module: nn.Module) -> bool:
    """Return whether a module's own forward keeps keys of an indexer in the cache."""
    code = innermost(type(module).forward)
    if code is None or _UPDATE not in code.__code__.co_names:
        return False
    return hasattr(module, "layer_idx") and _cache_of(code) is not None


def _cache_of(code: Forward) -> str | None:
    """Return the name of the parameter for the cache."""
    return next((name for name in _CACHES if name in inspect.signature(code).parameters), None)


def freeze_indexers(root: nn.Module) -> int:
    """Freeze the parameters of a module's indexers, which get no gradients: their models select keys without. DDP, for
    one, waits for the gradient of every parameter that is not frozen. Returns the number of indexers."""
    found = [part for part in root.modules() if is_indexer(part) or hasattr(part, _ENTRIES)]
    for part in found:
        part.requires_grad_(False)
    return len(found)


def indexer_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an indexer that gives an `IndexChoice`; None for any other module."""
    if not is_indexer(module):
        return None
    own = types.MethodType(type(module).forward, module)
    signature, name = inspect.signature(own), _cache_of(own)
    assert name is not None

    def run(*args: Any, **named: Any) -> IndexChoice:
        cache, given = _Cache(module), signature.bind(*args, **named)
        given.arguments[name] = cache
        try:
            with torch.no_grad():
                found = own(*given.args, **given.kwargs)
        except (AttributeError, IndexError, TypeError) as error:
            cache.refuse(f"scores keys in another way than is known here ({type(error).__name__}: {error})")
        if not isinstance(found, IndexChoice):
            cache.refuse("returns something else than positions")
        return found

    return run


class _Cache:
    """The cache as an indexer sees it."""

    def __init__(self, module: nn.Module) -> None:
        self._name, self.layer = type(module).__name__, cast(int, module.layer_idx)

    def update_indexer(self, keys: Tensor, layer: object) -> IndexKeys:
        """Take the keys [B, T, D] of this forward's tokens."""
        if layer != self.layer or keys.dim() != 3:
            self.refuse(f"caches keys {list(keys.shape)} for layer {layer}")
        return IndexKeys(self, keys)

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse(f"asks the cache for {name}")

    def refuse(self, what: str) -> NoReturn:
        """Raise ValueError that names the indexer and what it does."""
        raise ValueError(f"{self._name} {what}: not supported")


class Recorded:
    """A value of an indexer's code that stands for numbers of all keys. What is not recorded is refused."""

    cache: _Cache

    def refuse(self, what: str) -> NoReturn:
        self.cache.refuse(f"computes {what} of its scores")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    def __getitem__(self, index: object) -> NoReturn:
        self.refuse("a part")

    @classmethod
    def __torch_function__(
        cls, func: Forward, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        recorded = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Recorded))
        return recorded.called(func, args, dict(kwargs or {}))

    def called(self, func: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a function of torch."""
        self.refuse(getattr(func, "__name__", str(func)))


@dataclass(frozen=True)
class IndexKeys(Recorded):
    """The keys of all tokens [B, L, D], float32 [B, 1, D, L] at last."""

    cache: _Cache
    own: Tensor  # [B, T, D] of this forward's tokens
    is_turned: bool = False
    is_wide: bool = False
    is_beside_heads: bool = False

    def transpose(self, first: int, second: int) -> IndexKeys:
        if self.is_turned or self.is_beside_heads or {first % 3, second % 3} != {1, 2}:
            self.refuse("transpose")
        return replace(self, is_turned=True)

    def float(self) -> IndexKeys:
        return replace(self, is_wide=True)

    def unsqueeze(self, dim: int) -> IndexKeys:
        if dim != 1 or self.is_beside_heads:
            self.refuse("unsqueeze")
        return replace(self, is_beside_heads=True)

    def called(self, func: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        fits = func is torch.matmul and len(args) == 2 and not kwargs and args[1] is self
        query = args[0] if fits else None
        if not isinstance(query, Tensor) or query.dim() != 4 or query.dtype != torch.float32:
            return super().called(func, args, kwargs)
        if not (self.is_turned and self.is_wide and self.is_beside_heads) or query.shape[:2] != self.own.shape[:2]:
            self.refuse("another product")
        return _Products(self.cache, self.own, query)


@dataclass(frozen=True)
class _Products(Recorded):
    """relu(scale * query . key), float32 [B, T, H, L]."""

    cache: _Cache
    keys: Tensor
    query: Tensor
    scale: float = 1.0
    is_positive: bool = False

    def __mul__(self, factor: object) -> _Products:
        # A factor behind the relu is one before it if it is not negative, but for a rounding.
        if not isinstance(factor, float) or self.is_positive or self.scale != 1.0:
            self.refuse("multiplication")
        return replace(self, scale=factor)

    __rmul__ = __mul__

    def called(self, func: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func in (F.relu, torch.relu) and args[0] is self:
            return replace(self, is_positive=True)
        if func is not torch.matmul or len(args) != 2 or kwargs or not self.is_positive or args[1] is not self:
            return super().called(func, args, kwargs)
        weight = args[0]
        batch, num_rows, heads = self.query.shape[:3]
        if weight.shape != (batch, num_rows, 1, heads) or weight.dtype != torch.float32:
            self.refuse("another sum")
        return _Scores(self.cache, self, weight[:, :, 0])


@dataclass(frozen=True)
class _Scores(Recorded):
    """Scores [B, T, 1, L], then [B, T, L]."""

    cache: _Cache
    products: _Products
    weight: Tensor  # [B, T, H]
    is_squeezed: bool = False
    is_masked: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Their shape, as if there were endless keys."""
        return *self.weight.shape[:2], sys.maxsize

    def squeeze(self, dim: int) -> _Scores:
        if dim != -2 or self.is_squeezed:
            self.refuse("squeeze")
        return replace(self, is_squeezed=True)

    def masked_fill(self, mask: object, value: float) -> _Scores:
        if not self.is_squeezed or value != -torch.inf:
            self.refuse("masked_fill")
        return replace(self, is_masked=True)

    def __add__(self, mask: object) -> _Scores:
        """Add the causal mask. The hosted attention knows itself what a row sees."""
        if not self.is_squeezed or not isinstance(mask, Tensor):
            self.refuse("addition")
        return replace(self, is_masked=True)

    def called(self, func: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is Tensor.add and args[0] is self:
            return self + args[1]
        return super().called(func, args, kwargs)

    def topk(self, k: int, dim: int = -1) -> _Best:
        if not self.is_masked or dim != -1:
            self.refuse("topk")
        return _Best(self.cache, self, k)


@dataclass(frozen=True)
class _Best(Recorded):
    """The result of topk."""

    cache: _Cache
    scores: _Scores
    k: int

    @property
    def indices(self) -> IndexChoice:
        """The selected positions."""
        products, num_heads = self.scores.products, self.scores.weight.shape[2]
        weight = self.scores.weight.reshape(-1, num_heads)
        asked = IndexQueries(products.query.flatten(0, 1), weight, products.scale, self.k)
        return IndexChoice(asked, products.keys.flatten(0, 1), self.cache.layer)


@dataclass(frozen=True)
class IndexChoice:
    """The positions that rows [N = B * T] select: what an indexer returns in the place of their indices."""

    asked: IndexQueries
    keys: Tensor  # [N, D], the rows' own keys
    layer: int  # of the indexer, in whose cache the keys are
    _found: list[SelectedKeys | None] = field(default_factory=list)  # at most one

    def to(self, dtype: torch.dtype) -> IndexChoice:
        """Return itself: the code makes its indices int32."""
        return self

    def selected(self, select: Callable[[], SelectedKeys | None]) -> SelectedKeys | None:
        """Return what `select` finds. The layers of a forward that share a choice find it once: their rows and their
        keys stand in the same places."""
        if not self._found:
            self._found.append(select())
            if self._found[0] is not None and (watch := WATCHING.get()) is not None:
                watch(self._found[0])
        return self._found[0]


# What is called with each selection that this thread finds, before an attention uses it.
WATCHING: ContextVar[Callable[[SelectedKeys], None] | None] = ContextVar("lockstep_selections", default=None)
