"""The start-up forward of a hosted module: the shapes of its layers' KV and states, and calls that cannot be hosted.

The hosted attention drops the mask: it is causal, with the window that the layer names. So the probe compares the
window with the mask that transformers made for the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .operations.fused_layers import observing
from .recurrent.states import StateShape

OWN_ATTENTION = "lockstep_own_attention"  # attribute of an attention that its class computes with code of its own

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query and key indices -> visible
CallPlaces = dict[tuple[int, int], int]  # layer, and the number of its call in a forward -> among a rank's caches


@dataclass(frozen=True)
class KVShape:
    """The shape of one layer's KV for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    index_dim: int = 0  # of the keys of its indexer; 0: it has none
    index_rate: int = 1  # tokens for which the indexer has one key
    index_dtype: torch.dtype = torch.float32  # of these keys

    @property
    def num_bytes(self) -> int:
        numbers = (self.key_dim + self.value_dim) * self.num_kv_heads
        return numbers * self.dtype.itemsize + self.index_dim * self.index_dtype.itemsize


@dataclass(frozen=True)
class _Mask:
    window: int | None  # or the tokens of a chunk of positions
    is_plain: bool  # it shows what causal attention with this window sees, as far as it was tried
    is_chunked: bool  # the same within chunks


@dataclass
class LayerProbe:
    """A recorder of a module's calls of attention. It replaces the StepContext in the start-up forward."""

    longest: int  # tokens of the module's longest context: a window of so many is none
    layers: dict[int, KVShape] = field(default_factory=dict)
    states: dict[int, dict[str, StateShape]] = field(default_factory=dict)  # of recurrent layers, by name
    num_calls: Counter[int] = field(default_factory=Counter)
    windows: dict[int, nn.Module] = field(default_factory=dict)  # of some layers, with the first such attention
    skipped: set[int] = field(default_factory=set)  # layers that the module leaves out on text
    faults: dict[str, set[int]] = field(default_factory=dict)  # what is wrong -> layers
    _masks: list[_Mask] = field(default_factory=list)

    def mask_made(self, function: MaskFunction | None, window: int | None) -> Tensor:
        """Record a mask and return the number of the record, as a mask for the layers that get it.

        function: None if it cannot be tried on many indices at once.
        """
        window = None if window is None or window >= self.longest else window
        is_plain = function is None or _is_plain(function, window, self.longest)
        is_chunked = function is not None and bool(window) and _is_plain(function, window, self.longest, True)
        self._masks.append(_Mask(window, is_plain, is_chunked))
        return torch.full((1, 1, 1, 1), float(len(self._masks) - 1), dtype=torch.float32)

    def attention_called(
        self, module: nn.Module, layer: object, shape: KVShape, window: int | None, chunk: int | None,
        mask: Tensor | None,
    ) -> None:  # fmt: skip
        """Record one call, with a window or in chunks. Raises ValueError for one without its layer's index."""
        name = type(module).__name__
        if not isinstance(layer, int):
            raise ValueError(f"{name} cannot be hosted: it has no layer_idx, so its KV would have no place")
        if self.layers.setdefault(layer, shape) != shape:
            self._blame(layer, f"{name} calls its attention with KV of several shapes")
        self.num_calls[layer] += 1
        found = self._masks[int(mask)] if mask is not None and mask.numel() == 1 and self._masks else None
        if OWN_ATTENTION in vars(module):  # its code may have changed the mask that it got: it is one of all
            if not all(mask.is_plain and mask.window is None for mask in self._masks):
                self._blame(layer, f"the mask of {name} is not that of causal attention without a window")
            found = None
        is_chunked = chunk is not None and chunk < self.longest
        window = chunk if is_chunked else window
        window = None if window is None or window >= self.longest else window
        if window is not None:
            self.windows.setdefault(window, module)
        if found is not None and not (found.is_chunked if is_chunked else found.is_plain):
            told = "in chunks" if is_chunked else "with a window"
            self._blame(layer, f"the mask of {name} is not that of causal attention {told}")
        elif found is not None and found.window != window:
            of_mask = "no window" if found.window is None else f"a window of {found.window} tokens"
            told = "none" if window is None else str(window)
            self._blame(layer, f"the mask of {name} has {of_mask}, but its attention is told {told}")

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Note the layers of the module whose parts are not called in the context: those of cross-attention to images,
        which text leaves out."""
        waiting: set[int] = set()
        with ExitStack() as hooks:
            for part in module.modules():
                layer = getattr(part, "layer_idx", None)
                if isinstance(layer, int):
                    waiting.add(layer)

                    @observing
                    def called(part: nn.Module, _: object, layer: int = layer) -> None:
                        waiting.discard(layer)

                    hooks.callback(part.register_forward_pre_hook(called).remove)
            yield
        self.skipped = waiting

    def _blame(self, layer: int, fault: str) -> None:
        self.faults.setdefault(fault, set()).add(layer)

    def places(self, expected: Sequence[int]) -> CallPlaces | None:
        """Return the place of each call's KV where layers call their attention several times, call by call, each in the
        order of layers. None: all call it once, or a module does that has states or an indexer, or whose configuration
        counts neither its layers nor their calls.

        expected: see `refuse_faults`.
        """
        layers, most = sorted(self.layers), max(self.num_calls.values(), default=0)
        if most < 2 or self.states or any(shape.index_dim for shape in self.layers.values()):
            return None
        if layers != list(expected)[: len(layers)] or len(expected) not in (len(layers), self.num_calls.total()):
            return None
        calls = [(layer, call) for call in range(most) for layer in layers if call < self.num_calls[layer]]
        return {each: place for place, each in enumerate(calls)}

    def kv_shapes(self, expected: Sequence[int], dtype: torch.dtype) -> list[KVShape]:
        """Return the shape of a token's KV in each layer, without heads where it has none. Where layers call their
        attention several times: of each call, in the order of `places`."""
        if (places := self.places(expected)) is None:
            none = KVShape(0, 0, 0, dtype)
            return [self.layers.get(layer, none) for layer in expected]
        return [self.layers[layer] for layer, _ in places]

    def refuse_faults(self, expected: Sequence[int], name: str) -> None:
        """Raise ValueError that names everything that cannot be hosted.

        expected: this rank's layers with KV or states; name: of the module's class.
        """
        wrong = [f"{fault} (layers {_listed(layers)})" for fault, layers in self.faults.items()]
        repeated = self.places(expected)
        missing = set(expected) - set(self.layers) - set(self.states) - self.skipped
        if missing and not repeated:
            wrong.append(f"layers {_listed(missing)} do not use transformers' attention interface")
        if beyond := set(self.layers) - set(expected):
            wrong.append(
                f"layers {_listed(beyond)} call attention, but its configuration has layers {_listed(expected)}"
            )
        often = {layer for layer, num_calls in self.num_calls.items() if num_calls > 1}
        if often and not repeated:
            wrong.append(
                f"layers {_listed(often)} call their attention {max(self.num_calls.values())} times in a forward: the "
                "KV of a call would take the place of the one before"
            )
        if wrong:
            raise ValueError(f"{name} cannot be hosted: {'; '.join(wrong)}")


PROBING: ContextVar[LayerProbe | None] = ContextVar("lockstep_probing", default=None)


def _listed(layers: Iterable[int]) -> list[int]:
    return sorted(layers)


def _is_plain(function: MaskFunction, window: int | None, longest: int, in_chunks: bool = False) -> bool:
    """Return whether the mask is causal with this window: at the first rows, around the window's end, and far behind.

    longest: tokens of the longest context. A mask in chunks shows at its last row, or at powers of two. in_chunks:
    whether rows see their chunk of positions, of `window` tokens, instead.
    """
    width = window or 600
    powers = [1 << power for power in range(9, (longest - 1).bit_length())]
    edges = [0, 1, 2, 3, width - 1, width, width + 1, 2 * width + 20, *powers, *(power - 1 for power in powers)]
    rows = torch.tensor([*edges, longest - 1]).clamp(max=longest - 1)[:, None]
    keys = torch.cat(
        [torch.arange(3).expand(len(rows), -1), rows + torch.arange(-3, 3), rows - width + torch.arange(-2, 3)], 1
    )
    keys = keys.clamp(min=0)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        seen = function(zero, zero, rows[None, None], keys[None, None])
    except IndexError:
        return False  # it looks up tokens of this forward, and these indices are beyond them
    expected = keys <= rows
    if window is not None:
        expected = expected & (keys // window == rows // window if in_chunks else keys > rows - window)
    return torch.equal(seen.expand(1, 1, *keys.shape)[0, 0], expected)
