"""Attention whose own code counts the positions of its rows from the length of the cache (Llama 4 and Inkling scale
queries by them), and recurrent layers that are told of nothing but the cache (Inkling, Jamba, Mamba).

The rows of a step, and of a packed row, belong to several sequences: the cache that such code sees here has a length
for each row, and brings recurrent layers the keywords of the call.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ....kernels.attention.shared_rows import SharedRows
from ..steps.context import StepContext
from .carried import PACKING, SHARED_ROWS, STEP_KEYWORD, told
from .copied_code import innermost
from .packed_rows import NO_MASK, refuse_packed_positions

Forward = Callable[..., Any]

# Attribute of transformers' layers: whether checkpoints leave them their cache, which then is the same one again.
CHECKPOINTS_CACHE = "_can_checkpoint_with_cache"
_CACHES, _LENGTH, _HIDDEN = ("past_key_values", "cache"), "get_seq_length", "hidden_states"  # the second since 5.24
_INPUTS, _MASK = ("input_ids", "inputs_embeds"), "attention_mask"
_STATES = "cache_params"  # the cache's name in models whose layers are all recurrent, up to transformers 5.23
_POSITIONS = "position_ids"
_TOLD = (STEP_KEYWORD, PACKING, SHARED_ROWS)  # what tells of a call's sequences
# Attributes of parts that are told of the cache alone: convolutions of a layer that has several, compressors, indexers,
# and selective scans.
_UNTOLD = (
    *("conv_idx", "conv_qk_grouped", "compress_rate", "index_kpool", "token_budget", "short_conv_state_len"),
    "use_associative_scan",
)


def counting_forward(module: nn.Module) -> Forward | None:
    """Return the forward of an attention that counts, or of a layer with parts that are told of the cache alone, with a
    cache that knows its rows; None for any other module."""
    code = innermost(type(module).forward)
    if code is None:
        return None
    counts = hasattr(module, "layer_idx") and _LENGTH in code.__code__.co_names
    if not counts and not isinstance(module, GradientCheckpointingLayer):
        return None
    if not counts and not any(hasattr(part, name) for part in module.modules() for name in _UNTOLD):
        return None
    own = types.MethodType(type(module).forward, module)
    signature = inspect.signature(own)
    kinds = {each.kind for each in signature.parameters.values()}
    if _HIDDEN not in signature.parameters or _STATES in signature.parameters:  # the latter is told by its model
        return None
    taken = next((name for name in _CACHES if name in signature.parameters), None)
    if taken is None and inspect.Parameter.VAR_KEYWORD not in kinds:
        return None

    def run(*args: Any, **named: Any) -> Any:
        if any(isinstance(named.get(name), RowCache) for name in _CACHES):  # its model told it
            return own(*args, **named)
        hidden = signature.bind(*args, **named).arguments[_HIDDEN]
        cache = RowCache.of(module, hidden.shape[1], hidden.device, named)
        name = taken or next((name for name in _CACHES if name in named), _CACHES[0])
        given = signature.bind_partial(*args, **{key: value for key, value in named.items() if key not in _CACHES})
        if name in given.arguments:  # by its place
            given.arguments[name] = cache
            return own(*given.args, **given.kwargs)
        return own(*given.args, **{**given.kwargs, name: cache})

    return run


def telling_forward(module: nn.Module, recurrent: Collection[nn.Module]) -> Forward | None:
    """Return the forward of a model that passes its layers a mask and a cache alone (Mamba), with a cache that brings
    them the keywords of the call; None for any other module. recurrent: the recurrent layers in it.

    It raises ValueError for a cache that its caller brings, as generate() does, and for position_ids of packed rows
    without cu_seq_lens_q, which the model's own code ignores.
    """
    if not isinstance(module, PreTrainedModel) or (states := _states_of(module, recurrent)) is None:
        return None
    own = types.MethodType(type(module).forward, module)
    signature = inspect.signature(own)

    def run(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        if not isinstance(given.arguments.get(states), RowCache | None):
            raise ValueError(
                f"{type(module).__name__} was given a cache: hosted layers keep their own states, so call the module "
                "with use_cache=False and not through generate()"
            )
        inputs = [x for name in _INPUTS if (x := given.arguments.get(name)) is not None]
        cache = RowCache.of(module, inputs[0].shape[1], inputs[0].device, named) if inputs else None
        if cache is not None:
            given.arguments[states] = cache
        else:
            refuse_packed_positions(named.get(_POSITIONS))
        if given.arguments.get(_MASK) is NO_MASK:
            given.arguments[_MASK] = None
        return own(*given.args, **given.kwargs)

    return run


def _states_of(module: PreTrainedModel, recurrent: Collection[nn.Module]) -> str | None:
    """Return the name of the cache in the forward of a model whose layers are all recurrent: it takes no positions.
    None for any other model."""
    taken = inspect.signature(module.forward).parameters
    if _STATES in taken:
        return _STATES
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if _POSITIONS in taken or not layers or not all(any(p in recurrent for p in each.modules()) for each in layers):
        return None
    return next((name for name in _CACHES if name in taken), None)


def contexts_of(keywords: Mapping[str, object]) -> Tensor | None:
    """Return the contexts of the sequences of a call with these keywords, int32 [S]; None: each is as long as its
    rows."""
    step = told(keywords).get(STEP_KEYWORD)
    return step.paged.context_lens if isinstance(step, StepContext) else None


class RowCache:
    """The cache as such code sees it. It keeps nothing: keys and values go to the hosted attention as they are."""

    def __init__(
        self, module: nn.Module, num_rows: int, starts: Tensor, ends: Tensor, shared: SharedRows | None = None
    ) -> None:
        """Take the row offsets of the sequences, [S + 1], and the positions after their last rows, [S]. shared: the
        rows that they have in common; then these are of tokens."""
        self._name, self._num_rows, self._starts, self._ends = type(module).__name__, num_rows, starts, ends
        self._shared = shared
        self.keywords: Mapping[str, object] = {}  # of the layer's call, by which convolutions find their rows

    @classmethod
    def of(cls, module: nn.Module, num_rows: int, device: torch.device, named: Mapping[str, object]) -> RowCache | None:
        """Return the cache for a call with these keywords; None where every batch row counts its rows from 0."""
        named = told(named)
        step, packed, shared = (named.get(name) for name in _TOLD)
        if isinstance(step, StepContext):
            cache = cls(module, num_rows, step.paged.query_start, step.paged.context_lens)
        elif isinstance(shared, SharedRows):
            cache = cls(module, num_rows, shared.starts, shared.starts.diff(), shared)
        elif isinstance(packed, Tensor):
            cache = cls(module, num_rows, packed, packed.diff())
        elif step is not None:  # the start-up probe
            starts = torch.tensor([0, num_rows], dtype=torch.int32, device=device)
            cache = cls(module, num_rows, starts, starts[1:])
        else:
            return None
        cache.keywords = {name: named.get(name) for name in _TOLD}
        return cache

    def get_seq_length(self, _: object = 0) -> Tensor:
        """Return what each row's index in this call lacks of its position, int64 [N]."""
        rows = torch.arange(self._num_rows, dtype=self._starts.dtype, device=self._starts.device)
        if self._shared is not None:
            return self._shared.positions - rows
        owner = torch.searchsorted(self._starts, rows, right=True) - 1
        return (self._ends - self._starts[1:]).to(torch.int64)[owner.clamp(max=len(self._ends) - 1)]

    def get_query_offset(self, layer: object = 0) -> Tensor:
        """Return `get_seq_length`."""
        return self.get_seq_length(layer)

    def get_mask_sizes(self, num_rows: int, *_: object) -> tuple[int, int]:
        """Return the number of this call's keys, and 0, the first of them."""
        return num_rows, 0

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this call."""
        return keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(f"{self._name} asks the cache for {name}: not supported")
