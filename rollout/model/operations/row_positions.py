"""Attention whose own code counts the positions of its rows from the length of the cache (Llama 4 scales queries by
them). The rows of a step, and of a packed row, belong to several sequences: the cache that the code sees here has a
length for each row.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..attention import STEP_KEYWORD, StepContext
from .copied_code import innermost

Forward = Callable[..., Any]

_CACHE, _LENGTH, _HIDDEN = "past_key_values", "get_seq_length", "hidden_states"


def counting_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an attention that counts, with the positions of its rows; None for any other module."""
    code = innermost(type(module).forward)
    if code is None or not hasattr(module, "layer_idx") or _LENGTH not in code.__code__.co_names:
        return None
    own = types.MethodType(type(module).forward, module)
    signature = inspect.signature(own)
    if not {_CACHE, _HIDDEN} <= set(signature.parameters):
        return None

    def run(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        step, packed = named.get(STEP_KEYWORD), named.get("cu_seq_lens_q")
        num_rows = given.arguments[_HIDDEN].shape[1]
        cache: _Cache | None = None  # rows count from 0
        if isinstance(step, StepContext):
            cache = _Cache(module, num_rows, step.paged.query_start, step.paged.context_lens)
        elif packed is not None:
            cache = _Cache(module, num_rows, packed, packed.diff())
        given.arguments[_CACHE] = cache
        return own(*given.args, **given.kwargs)

    return run


class _Cache:
    """The cache as such code sees it. It keeps nothing: keys and values go to the hosted attention as they are."""

    def __init__(self, module: nn.Module, num_rows: int, starts: Tensor, ends: Tensor) -> None:
        """Take the row offsets of the sequences, [S + 1], and the positions after their last rows, [S]."""
        self._name, self._num_rows, self._starts, self._ends = type(module).__name__, num_rows, starts, ends

    def get_seq_length(self, _: object = 0) -> Tensor:
        """Return what each row's index in this call lacks of its position, int64 [N]."""
        rows = torch.arange(self._num_rows, dtype=self._starts.dtype, device=self._starts.device)
        owner = torch.searchsorted(self._starts, rows, right=True) - 1
        return (self._ends - self._starts[1:]).to(torch.int64)[owner.clamp(max=len(self._ends) - 1)]

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this call."""
        return keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(f"{self._name} asks the cache for {name}: not supported")
