"""The operations that a call runs, counted by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def operations_of(call: Callable[[], object]) -> Counter[str]:
    """Run the call, and count torch's operations in it, those of backward passes included."""
    with _Counting() as mode:
        call()
    return mode.counts
