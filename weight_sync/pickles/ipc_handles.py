"""vLLM's IPC handles: pickled arguments of torch's functions that open a tensor in another process's memory.

The payload is base64 of the pickle of a list with a dict for each tensor, {device: arguments}, as vLLM's trainers make
it from `reduce_tensor`; older ones send {device: (function, arguments)}. A device is the UUID of a GPU, or "cpu" for
torch's shared memory (vLLM itself has no handles on CPUs). Packed, it is one dict, of a uint8 tensor with the bytes of
all tensors back to back. It is read as the payload of `payload` is: through a closed
table of names, without a call of any of them, and every handle is checked before memory is attached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..layout.json_values import is_count
from ..manifest import TensorSpec
from ..same_host.handover import MAX_OFFENDERS, raise_if_any, shown
from .inert import Call, Global, UnsafePickle
from .payload import DEFAULT_MAX_BYTES, parse_payload
from .payload_tensors import TensorPlan, open_all, plan_tensor

CPU = "cpu"
_REDUCTIONS = "torch.multiprocessing.reductions"
_DEVICE_AT = 6  # of the arguments of rebuild_cuda_tensor


def read_ipc_handles(
    serialized: str,
    specs: Sequence[TensorSpec],
    device: torch.device,
    *,
    tensor_sizes: Sequence[int] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    allow: bool = True,
    timeout_s: float = 10.0,
) -> list[tuple[str, Tensor]]:
    """Read the tensors of `specs` from their handles for this engine's `device`.

    tensor_sizes: bytes of each tensor in a packed buffer; None: a handle for each tensor. They are in the sender's
    memory (except parts of a packed buffer that are not aligned, which are copied): copy them, wait for the copies,
    drop them, and only then reply. allow: False refuses every payload. Raises as `read_framework_payload`, and
    ValueError where the handles are not of these specs, or none is for this device.
    """
    if not allow:
        raise UnsafePickle("pickled payloads are turned off (allow_pickle=False): send tensors over a group instead")
    key = CPU if device.type == CPU else str(torch.cuda.get_device_properties(device).uuid)
    payload = parse_payload(serialized, max_bytes)
    if tensor_sizes is not None:
        return _packed(payload, specs, tensor_sizes, key, timeout_s)
    if type(payload) is not list or len(payload) != len(specs):
        found = f"{len(payload)}" if type(payload) is list else "something else"
        raise ValueError(f"a list of {len(specs)} handles was expected, not {found}")
    problems: list[str] = []
    plans: list[TensorPlan] = []
    for spec, handles in zip(specs, payload, strict=True):
        if len(problems) >= MAX_OFFENDERS:
            problems.append("the rest was not read")
            break
        try:
            plans.append(_plan(handles, key, spec))
        except UnsafePickle:
            raise
        except ValueError as error:
            problems.append(f"{spec.name}: {error}")
    raise_if_any(problems, "IPC handles")
    return [(spec.name, tensor) for spec, tensor in zip(specs, open_all(plans, timeout_s), strict=True)]


def _plan(handles: object, key: str, spec: TensorSpec) -> TensorPlan:
    """Plan a tensor from its handles. Raises ValueError where its dtype or shape is not that of `spec`."""
    plan = plan_tensor(_call(handles, key))
    found = TensorSpec(spec.name, plan.dtype, plan.shape)
    if found != spec:
        raise ValueError(f"the handle is of {found.describe()}, the update says {spec.describe()}")
    return plan


def _call(handles: object, key: str) -> Call:
    """Make the record of the call that would open the tensor here. Raises ValueError where there is none for `key`."""
    if not isinstance(handles, Mapping):
        raise ValueError("an object of handles by device was expected")
    found = next((handles[name] for name in handles if type(name) is str and _bare(name) == _bare(key)), None)
    if found is None:
        devices = ", ".join(shown(name) for name in list(handles)[:8]) or "none"
        what = "this engine's model is on a CPU, which opens no CUDA handle" if key == CPU else f"its device is {key}"
        raise ValueError(f"no handle for this engine: {what}; there are handles for: {devices}")
    wanted = Global(_REDUCTIONS, "rebuild_tensor" if key == CPU else "rebuild_cuda_tensor")
    function, arguments = wanted, found
    if type(found) is tuple and len(found) == 2 and type(found[0]) is Global:
        function, arguments = found
    if function != wanted or type(arguments) is not tuple:
        raise ValueError(f"a handle is ({wanted.module}.{wanted.name}, arguments), not {shown(function.name)}")
    if key != CPU and len(arguments) > _DEVICE_AT:  # the sender's index may be another GPU here
        arguments = (*arguments[:_DEVICE_AT], key, *arguments[_DEVICE_AT + 1 :])
    return Call(wanted, arguments)


def _bare(device: str) -> str:
    return device.removeprefix("GPU-").lower()


def _packed(
    handles: object, specs: Sequence[TensorSpec], sizes: Sequence[int], key: str, timeout_s: float
) -> list[tuple[str, Tensor]]:
    wrong = [spec.describe() for spec, size in zip(specs, sizes, strict=False) if spec.num_bytes != size]
    if len(sizes) != len(specs) or not all(map(is_count, sizes)) or wrong:
        raise ValueError(f"tensor_sizes must be the bytes of each tensor; they differ for: {wrong[:MAX_OFFENDERS]}")
    flat = _plan(handles, key, TensorSpec("the packed buffer", torch.uint8, (sum(sizes),)))
    if flat.shape[0] > 1 and flat.stride[0] != 1:
        raise ValueError("the packed buffer must be contiguous uint8 [bytes]")
    whole, end, found = open_all([flat], timeout_s)[0], 0, []
    for spec in specs:
        start, end = end, end + spec.num_bytes
        part = whole[start:end]
        if part.data_ptr() % spec.dtype.itemsize or part.storage_offset() % spec.dtype.itemsize:
            part = part.clone()
        found.append((spec.name, part.view(spec.dtype).reshape(spec.shape)))
    return found
