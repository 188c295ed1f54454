"""The attention of families that compute it with code of their own (GPT-J, GPT-Neo, Falcon): their code runs as it is.

Only its product of queries and keys gives `Scores`, which record what the code does with them up to their product with
values. That is the hosted attention's. Such classes know no attention implementation, and their layers hand nothing on.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..operations.copied_code import innermost
from ..operations.packed_rows import PACKED
from .key_bias import KeyBias
from .scores import Forward, Scores

_SOFTMAX = {"softmax", "Softmax"}
_FEWEST_PARTS = 2  # an attention has at least so many layers with weights; a router has one


def own_attentions(root: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that compute attention with code of their own, one a layer, in the order of layers;
    none where its class uses transformers' interface, or where their number is not that of the layers."""
    if not isinstance(root, PreTrainedModel) or interfaced_models(root):
        return []
    found = [part for part in root.modules() if _is_attention(part)]
    num_layers = getattr(root.config.get_text_config(decoder=True), "num_hidden_layers", None)
    return found if len(found) == num_layers else []


def interfaced_models(root: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model itself where its class uses transformers' attention interface, else the decoders inside that do:
    of a class of images and text, whose encoder of images may have code of its own."""
    if root._can_set_attn_implementation():
        return [root]
    config = root.config.get_text_config(decoder=True)
    models = [part for part in root.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    return [model for model in models if model._can_set_attn_implementation()]


def _is_attention(part: nn.Module) -> bool:
    if isinstance(part, PreTrainedModel) or len([c for c in part.children() if _has_weight(c)]) < _FEWEST_PARTS:
        return False
    return any(_SOFTMAX & names for names in map(_names, _functions(type(part))))


def _has_weight(part: nn.Module) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base is nn.Module:
            return
        yield from (code for value in vars(base).values() if (code := innermost(value)) is not None)


def _names(function: types.FunctionType) -> set[str]:
    return set(function.__code__.co_names)


class OwnAttention:
    """An attention of a class's own code, whose products are the hosted attention's."""

    def __init__(self, part: nn.Module, config: PretrainedConfig, key_bias: KeyBias | None = None) -> None:
        """Take the attention, the configuration of its model, which names the hosted attention to call, and what the
        model gives to its attentions to add to the scores of keys."""
        self._part, self._config, self._key_bias = part, config, key_bias
        self._own = types.MethodType(type(part).forward, part)
        self._windows = {name: window for name, one in part.named_buffers(recurse=False) if (window := _window(one))}

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the class's forward. The weights that it returns are None."""
        hidden = args[0] if args else named["hidden_states"]
        with _Products(self, *hidden.shape[:2]):
            out = self._own(*args, **named)
        return type(out)(None if isinstance(one, Scores) else one for one in out) if type(out) in (tuple, list) else out

    def refuse(self, what: str) -> NoReturn:
        """Raise ValueError that names the attention and what its code does."""
        raise ValueError(f"{type(self._part).__name__} {what}: not supported")

    def window_of(self, mask: Tensor) -> int | None:
        """Return the window of a mask that is a part of one of the attention's buffers; 0: none. None: it is not."""
        memory = mask.untyped_storage().data_ptr()
        for name, window in self._windows.items():
            buffer = getattr(self._part, name)
            if buffer.untyped_storage().data_ptr() == memory:
                return 0 if window == buffer.shape[-1] else window
        return None

    def is_key_bias(self, value: Tensor) -> bool:
        """Return whether a tensor has the form of the numbers that the model adds to the scores of keys."""
        return self._key_bias is not None and self._key_bias.is_like(value)

    def attend(self, scores: Scores, value: Tensor) -> Tensor:
        """Return softmax(scores) @ value, of the hosted attention."""
        tensors = (scores.query, scores.key, value)
        by_head = [t if t.dim() == 4 else t.unflatten(0, (scores.batch, -1)) for t in tensors]
        query, key = (t.to(value.dtype) for t in by_head[:2])  # some code widens them to compute scores
        attention = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
        mask = PACKED if scores.is_packed else None
        bias = None
        if self._key_bias is not None and scores.bias:
            bias = self._key_bias.table(scores.bias, value.dtype, scores.shape[-1])
        out, _ = attention(
            self._part, query, key, by_head[2], mask, scaling=scores.scale, sliding_window=scores.window or None,
            position_bias=bias,
        )  # fmt: skip
        out = out.transpose(1, 2)
        return out if value.dim() == 4 else out.flatten(0, 1)


class _Products(TorchFunctionMode):
    """A mode in which products of queries and keys give `Scores`."""

    def __init__(self, attention: OwnAttention, batch: int, num_rows: int) -> None:
        super().__init__()
        self._attention, self._batch, self._num_rows = attention, batch, num_rows

    def __torch_function__(
        self, func: Forward, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Scores) for kind in types):
            return Scores.__torch_function__(func, types, args, kwargs)
        named = dict(kwargs or {})
        if func in _PRODUCTS and len(args) == 2 and not named and self._are_queries_and_keys(*args):
            return self._scores(*args)
        if func in _SUMS and (found := self._sum_with_bias(*args, **named)) is not None:
            return found
        # Numbers that Python brings to a GPU are waited for, and a step with such a copy cannot be captured.
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], int | float):
            return torch.full((), args[0], **named)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(map(_as_slice, args[1]))
        return func(*args, **named)

    def _sum_with_bias(
        self, bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1.0, alpha: float = 1.0
    ) -> Scores | None:
        """Return bias + alpha * the product of queries and keys; None for others."""
        if not self._are_queries_and_keys(batch1, batch2) or not self._attention.is_key_bias(bias):
            return None
        return self._scores(batch1, batch2) * alpha + bias if beta == 1 else None

    def _are_queries_and_keys(self, left: Tensor, right: Tensor) -> bool:
        """Return whether [..., T, D] and [..., D, T] are of all rows of the call."""
        if left.dim() != right.dim() or left.dim() not in (3, 4):
            return False
        return left.shape[-2] == right.shape[-1] == self._num_rows

    def _scores(self, query: Tensor, key: Tensor) -> Scores:
        shape = torch.Size([*torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), *[self._num_rows] * 2])
        return Scores(self._attention, self._batch, query, key.transpose(-1, -2), shape, query.dtype)


_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
)
_SUMS: frozenset[Callable[..., Any]] = frozenset((torch.baddbmm, Tensor.baddbmm))


def _as_slice(index: object) -> object:
    """Return the slice that selects what a list of one index does, and any other index as it is."""
    if not isinstance(index, list) or len(index) != 1 or type(index[0]) is not int:
        return index
    return slice(index[0], index[0] + 1 or None)


def _window(buffer: Tensor) -> int | None:
    """Return how many keys a row sees by a buffer [1, 1, P, P] that is a causal mask; None for any other buffer."""
    if buffer.dtype != torch.bool or buffer.dim() != 4 or buffer.shape[:2] != (1, 1):
        return None
    mask = buffer[0, 0]
    if mask.shape[0] != mask.shape[1] or not len(mask):
        return None
    window = int(mask[-1].sum())
    rows = torch.arange(len(mask), device=mask.device)
    distance = rows[:, None] - rows
    return window if torch.equal(mask, (distance >= 0) & (distance < window)) else None
