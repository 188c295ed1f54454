"""Tensors whose memory holds the numbers that they show, which kernels read by their address.

Others are tensors of a class with operations of its own: shards (DTensor), quantised weights (torchao), fake tensors.
Their address is 0, or that of something else.
"""

from __future__ import annotations

from torch import Tensor


def has_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory holds its numbers."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def refuse_other_memory(function: str, **tensors: Tensor | None) -> None:
    """Raise ValueError that names every tensor whose memory does not hold its numbers. function: their reader."""
    wrong = [
        f"{name} is a {type(tensor).__name__}"
        for name, tensor in tensors.items()
        if tensor is not None and not has_plain_memory(tensor)
    ]
    if wrong:
        raise ValueError(
            f"{function}: {', '.join(wrong)}, whose memory does not hold its numbers, as a kernel reads them. Gather "
            "shards first (a module of fully_shard gathers those of its own forward alone), and dequantise weights"
        )
