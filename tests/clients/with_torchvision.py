"""Run a program beside the torchvision of the index, whose operators torch without CUDA cannot load and few need.

python -m lockstep.tests.clients.with_torchvision PROGRAM|MODULE [ARGUMENT ...]
"""

from __future__ import annotations

import runpy
import sys

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")  # kept: its operators end with it


def main() -> None:
    """Define the operators and run the program, or the module, with the arguments behind its name."""
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
