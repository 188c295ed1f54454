"""Float32 sums of gradients over the micro-batches of a step, for parameters in lower precision.

bfloat16 keeps 8 bits: added to a sum 512 times as large, a micro-batch's gradient rounds to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientSums:
    """The sums by parameter. A hook adds each gradient as soon as a backward pass has it, and drops the gradient.

    Parameters in float32 have no hook: autograd sums their gradients itself.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: dict[Tensor, Tensor] = {}  # by parameter
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self.add)

    def add(self, parameter: Tensor) -> None:
        """Add the parameter's gradient, widened, to its sum. The parameter has no gradient then."""
        if (gradient := parameter.grad) is None:
            return
        parameter.grad = None
        if (total := self._sums.get(parameter)) is None:
            self._sums[parameter] = gradient.to(torch.float32)
        else:
            total += gradient

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient in float32 and forget it: the sum, or the gradient of a float32 parameter."""
        if parameter.dtype != torch.float32:
            self.add(parameter)  # a gradient that no backward pass has computed
            return self._sums.pop(parameter, None)
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def averaged(self, parameters: Sequence[Tensor], result: Tensor) -> torch.futures.Future[Tensor]:
        """Average the sums of some parameters over all ranks, in float32, without waiting.

        Returns a future of `result`, which is done once the sums are written.
        """
        sums = [self._sum(parameter) for parameter in parameters]
        flat = torch.cat([total.flatten() for total in sums])
        flat.div_(dist.get_world_size())

        def write_back(_done: object) -> Tensor:
            for total, part in zip(sums, flat.split([total.numel() for total in sums]), strict=True):
                total.copy_(part.view(total.shape))
            return result

        return dist.all_reduce(flat, async_op=True).get_future().then(write_back)

    def _sum(self, parameter: Tensor) -> Tensor:
        if parameter not in self._sums:  # other ranks may have a gradient where this one has none
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._sums[parameter]
