"""Linear layers that read the same tensor one after another, computed in one call of the product.

Siblings are found by transformers' names and share a call only after one forward in which the module gave all of them
the same tensor object, unchanged, in their order. The bits are those of separate calls (`linear.Together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ....kernels.linear.linear import Layer
from .fused_layers import may_change, needs_grad

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def siblings_of(parent: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield children that may read one tensor: plain linear layers of equal width, under names of SIBLINGS."""
    children = dict(parent.named_children())
    for names in SIBLINGS:
        found = [children.get(name) for name in names]
        layers = [layer for layer in found if isinstance(layer, nn.Linear) and type(layer) is nn.Linear]
        if len(layers) == len(names) and len({layer.in_features for layer in layers}) == 1:
            yield layers


class SharedInput:
    """The forwards of siblings. One forward without gradients is watched; from then on the first layer's call computes
    all layers, and the other layers return their stored results as long as they get the same tensor."""

    def __init__(
        self,
        layers: Sequence[nn.Linear],
        alone: Callable[..., Tensor],
        products: Callable[[Tensor, Sequence[Layer]], list[Tensor]],
    ) -> None:
        """Watch the first forward of `layers`.

        alone: x [...,K], weight [N,K], bias [N] or None -> [...,N], the product of one layer; products: of all.
        """
        self._layers = layers
        self._alone, self._products = alone, products
        self._is_shared: bool | None = None  # None until a forward was watched to its last layer
        self._x: Tensor | None = None  # the first layer's input, until the last layer has run
        self._seen: Tensor | None = None  # a copy of that input, while a forward is watched
        self._num_seen = 0  # number of that forward's layers so far
        self._outs: list[Tensor] = []  # results of the layers to come, the next one last

    def forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: self._forward(index, x)

    def _forward(self, index: int, x: Tensor) -> Tensor:
        layer = self._layers[index]
        # A hook before a layer may compute its weight, or another input.
        if self._is_shared is False or may_change(self._layers) or needs_grad(x, self._layers):
            return self._alone(x, layer.weight, layer.bias)
        if self._is_shared is None:
            if x.is_cpu or not torch.cuda.is_current_stream_capturing():  # the comparison is read on the host
                self._watch(index, x)
            return self._alone(x, layer.weight, layer.bias)
        if index == 0:
            outs = self._products(x, [(layer.weight, layer.bias) for layer in self._layers])
            self._x, self._outs = x, outs[:0:-1]
            return outs[0]
        if x is not self._x or len(self._outs) != len(self._layers) - index:
            return self._alone(x, layer.weight, layer.bias)
        out = self._outs.pop()
        if not self._outs:
            self._x = None
        return out

    def _watch(self, index: int, x: Tensor) -> None:
        if index == 0:
            self._x, self._seen, self._num_seen = x, x.clone(), 1
            return
        seen = self._seen
        if x is not self._x or seen is None or index != self._num_seen or not torch.equal(x, seen):
            self._is_shared = False
        elif index == len(self._layers) - 1:
            self._is_shared = True
        self._num_seen += 1
        if self._is_shared is not None:
            self._x = self._seen = None
