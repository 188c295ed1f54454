"""Torch's default device, which a trainer may set: the engine makes its own small tensors on the host all the same."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from ..nothing import NOTHING


def on_host() -> AbstractContextManager[object]:
    """Return a context in which torch makes tensors on the host where no device is named.

    Costs nothing where the thread's default device is the host: entered around each step.
    """
    if not torch._C._is_torch_function_mode_enabled():  # a default device is such a mode
        return NOTHING
    return NOTHING if torch.get_default_device().type == "cpu" else torch.device("cpu")
