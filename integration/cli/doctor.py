"""`lockstep doctor`: report which kernels run here, whether results are independent of the batch, and whether a model
can be hosted."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence

from ..version import version
from .arguments.parser import CommandParser
from .machine import processor, products

_SHAPES = ((768, 768), (2304, 768), (768, 2304), (1024, 256))  # layers (out_features, in_features)


def run(arguments: Sequence[str]) -> int:
    """Print the report. Returns the exit code: 1 where results depend on the batch, or the model is refused or gives no
    numbers."""
    parser = CommandParser(
        prog="lockstep doctor",
        description="Report which kernels run here and why, and whether results are independent of the batch. Exits "
        "with 1 where they are not, or where the model cannot be hosted.",
    )
    parser.add_argument("--model", help="folder of a model to check as an engine does when it is made")
    model = parser.parse_args(arguments).model
    import torch

    from ...kernels.attention.paged import attention_path
    from ...kernels.machine import native
    from ...kernels.machine.gpu import why_not_triton
    from ...kernels.self_test import default_candidates, self_test

    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    for name, value in (*_versions().items(), *processor().items()):
        _say(name, value)
    _say("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors")
    _say("GPU", ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none")
    _say("Triton", why_not_triton("cuda") or "serve CUDA devices")
    for source in sorted(native.KERNELS.glob("*/*.cpp")):
        name = source.relative_to(native.KERNELS).as_posix()
        library = native.load(name)
        _say(source.name, library.path if library else f"not used: {native.why_unavailable(name)}")
    dtypes = (torch.float32, torch.bfloat16)
    _say("products", products())
    is_invariant = True
    for device in devices:
        for dtype in dtypes:
            guarantee = self_test(_SHAPES, dtype, device, default_candidates(device, dtype))
            is_invariant &= guarantee.invariant
            kind = f"{device.type} {str(dtype).removeprefix('torch.')}"
            path = attention_path(device, dtype)
            word = "invariant" if guarantee.invariant else "NOT INVARIANT"
            _say(kind, f"attention {path}; {word}: {guarantee.reason} ({guarantee.seconds:.2f} s)")
    return 0 if _check(model) and is_invariant else 1


def _check(folder: str | None) -> bool:
    """Check a model, if one is named, and say the verdict. Returns whether it can be hosted, and gives numbers."""
    if folder is None:
        return True
    from ...rollout.check.module_check import check_hosted
    from ...rollout.model.hosted_model import HostedModel

    try:
        hosted = HostedModel.load(folder, dtype=None, device=None, invariant=True)
        verdict = check_hosted(hosted, anew=True)
    except ValueError as refusal:
        _say("model", refusal)
        return False
    assert verdict is not None  # a whole model
    _say("model", f"{type(hosted.module).__name__}: {verdict.describe()}")
    return verdict.is_finite


def _say(name: str, value: object) -> None:
    print(f"{name:20} {value}", flush=True)


def _versions() -> dict[str, str]:
    found = {"lockstep": version(), "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "deepspeed"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
