"""The tensors of a framework's pickled payload: tables of the allowed names, and checked plans of the tensors.

A payload may contain only the names in the tables below. Their functions take the record of a call (`inert.Call`) and
return a checked plan, or raise ValueError with the reason; no memory is attached before `open_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from ..layout.json_values import is_count
from ..manifest import MAX_DIMENSIONS, parse_dtype
from ..same_host.cuda_ipc import CudaHandle, visible_uuids
from ..same_host.handover import shown, strided_problem
from .inert import Call, Global
from .shared_storage import DescriptorStorage, EmptyStorage, NamedStorage, StoragePlan

Name = tuple[str, str]  # module and name
T = TypeVar("T")

_REDUCTIONS = "torch.multiprocessing.reductions"


@dataclass(frozen=True)
class _StridedPlan:
    """A CPU tensor in a shared storage; stride and offset in elements."""

    storage: StoragePlan
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def checked(self) -> _StridedPlan:
        problem = self.storage.problem() or strided_problem(
            self.shape, self.stride, self.offset, self.dtype.itemsize, self.storage.num_bytes
        )
        if problem:
            raise ValueError(problem)
        return self


TensorPlan = _StridedPlan | CudaHandle


def plan_tensor(value: object) -> TensorPlan:
    """Plan one tensor of a payload. Raises ValueError with the reason if its description is wrong."""
    return _called(value, _TENSORS, "a tensor")


def _shared_tensor(call: Call) -> TensorPlan:
    """Plan rebuild_tensor(class, storage, (offset, size, stride, requires_grad))."""
    _, storage, metadata = _arguments(call, 3)
    if type(metadata) is not tuple or len(metadata) != 4:
        raise ValueError("tensor metadata are not offset, size, stride and requires_grad")
    return _strided(storage, *metadata[:3])


def _plain_tensor(call: Call) -> TensorPlan:
    """Plan _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)."""
    return _strided(*_arguments(call, 6)[:4])


def _parameter(call: Call) -> TensorPlan:
    """Plan _rebuild_parameter(data, requires_grad, hooks)."""
    data = _arguments(call, 3)[0]
    if type(data) is Call and _TENSORS.get(name_of(data.function)) is _parameter:
        raise ValueError("a parameter of a parameter")
    return plan_tensor(data)


def _strided(storage: object, offset: object, shape: object, stride: object) -> TensorPlan:
    plan, dtype = _called(storage, _TYPED_STORAGES, "a storage")
    # `checked` refuses an offset that is no count.
    return _StridedPlan(plan, dtype, cast(int, offset), counts_of(shape), counts_of(stride)).checked()


def _cuda_tensor(call: Call) -> TensorPlan:
    """Plan rebuild_cuda_tensor(...), 15 arguments; the seventh may be a device's UUID, as in SGLang's patch."""
    values = list(_arguments(call, 15))
    values[1], values[2], values[5] = counts_of(values[1]), counts_of(values[2]), dtype_of(values[5])
    handle = CudaHandle.from_arguments(values)
    if problem := handle.problem(visible_uuids()):
        raise ValueError(problem)
    return handle


def _typed_storage(call: Call) -> tuple[StoragePlan, torch.dtype]:
    """Plan rebuild_typed_storage(storage, dtype)."""
    storage, dtype = _arguments(call, 2)
    return _called(storage, _STORAGES, "an untyped storage"), dtype_of(dtype)


def _typed_storage_child(call: Call) -> tuple[StoragePlan, torch.dtype]:
    """Plan rebuild_typed_storage_child(storage, class)."""
    storage, kind = _arguments(call, 2)
    dtype = _STORAGE_CLASSES.get(name_of(kind))
    if dtype is None:
        raise ValueError("not a typed storage's class")
    return _called(storage, _STORAGES, "an untyped storage"), dtype


def _named_storage(call: Call) -> StoragePlan:
    """Plan rebuild_storage_filename(class, manager, handle, size)."""
    _, manager, handle, num_bytes = _arguments(call, 4)
    # Unchecked until `problem` returns None.
    return NamedStorage(cast(bytes, manager), cast(bytes, handle), cast(int, num_bytes), sent=call)


def _descriptor_storage(call: Call) -> StoragePlan:
    """Plan rebuild_storage_fd(class, DupFd, size)."""
    _, duplicate, num_bytes = _arguments(call, 3)
    identity = state_of(duplicate, _DUPLICATES, {"_id"})["_id"]
    if type(identity) is not tuple or len(identity) != 2:
        raise ValueError("a descriptor's identity is not (address, key)")
    return DescriptorStorage(*identity, cast(int, num_bytes))  # unchecked until `problem` returns None


def _empty_storage(call: Call) -> StoragePlan:
    """Plan rebuild_storage_empty(class)."""
    _arguments(call, 1)
    return EmptyStorage()


_TENSORS: dict[Name, Callable[[Call], TensorPlan]] = {
    (_REDUCTIONS, "rebuild_tensor"): _shared_tensor,
    (_REDUCTIONS, "rebuild_cuda_tensor"): _cuda_tensor,
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _cuda_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _plain_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
_TYPED_STORAGES: dict[Name, Callable[[Call], tuple[StoragePlan, torch.dtype]]] = {
    (_REDUCTIONS, "rebuild_typed_storage"): _typed_storage,
    (_REDUCTIONS, "rebuild_typed_storage_child"): _typed_storage_child,
}
_STORAGES: dict[Name, Callable[[Call], StoragePlan]] = {
    (_REDUCTIONS, "rebuild_storage_filename"): _named_storage,
    (_REDUCTIONS, "rebuild_storage_fd"): _descriptor_storage,
    (_REDUCTIONS, "rebuild_storage_empty"): _empty_storage,
}
_STORAGE_CLASSES: dict[Name, torch.dtype] = {
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "ShortStorage"): torch.int16,
}
_DTYPES: dict[Name, torch.dtype] = {
    ("torch", name): parse_dtype(name)
    for name in (
        *("bfloat16", "float16", "float32", "float64", "bool", "uint8", "uint16", "uint32", "uint64"),
        *("int8", "int16", "int32", "int64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
METADATA = ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
BUCKETS = {("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorBucket")}
PER_RANK = {
    ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"),
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"),
}
_DUPLICATES = {("multiprocessing.resource_sharer", "DupFd")}
_SIZE = ("torch", "Size")
_IGNORED = {  # allowed in arguments that are not read
    ("collections", "OrderedDict"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}
ALLOWED: frozenset[Name] = frozenset(
    {*_TENSORS, *_TYPED_STORAGES, *_STORAGES, *_STORAGE_CLASSES, *_DTYPES, *BUCKETS, *PER_RANK, *_DUPLICATES}
    | {*_IGNORED, METADATA, _SIZE}
)


def name_of(value: object) -> Name:
    return (value.module, value.name) if type(value) is Global else ("", "")


def _called(value: object, table: Mapping[Name, Callable[[Call], T]], what: str) -> T:
    """Apply the table's function to the record of a call, once. Raises ValueError for any other value."""
    found = table.get(name_of(value.function)) if type(value) is Call else None
    if found is None or type(value) is not Call:
        raise ValueError(f"{what} was expected, not {described_value(value)}")
    if value.reading is None:
        value.reading = found(value)
    return cast(T, value.reading)


def described_value(value: object) -> str:
    if type(value) is Call:
        return f"{value.function.module}.{value.function.name}(...)"
    return f"{value.module}.{value.name}" if type(value) is Global else shown(value)


def _arguments(call: Call, count: int) -> tuple[object, ...]:
    if len(call.arguments) != count or call.state is not None:
        raise ValueError(f"{described_value(call)} with {len(call.arguments)} arguments, not {count}")
    return call.arguments


def state_of(value: object, names: set[Name], keys: set[str]) -> dict[str, object]:
    """Return the attributes of a new object of one of these classes."""
    if type(value) is not Call or name_of(value.function) not in names or value.arguments:
        raise ValueError(
            f"{' or '.join(sorted({name for _, name in names}))} was expected, not {described_value(value)}"
        )
    if type(value.state) is not dict or set(value.state) != keys:
        raise ValueError(f"{value.function.name} must have exactly {', '.join(sorted(keys))}")
    return value.state


def dtype_of(value: object) -> torch.dtype:
    dtype = _DTYPES.get(name_of(value))
    if dtype is None:
        raise ValueError(f"a dtype was expected, not {described_value(value)}")
    return dtype


def counts_of(value: object) -> tuple[int, ...]:
    """Read a torch.Size, tuple or list of counts, at most one for each dimension that a tensor can have."""
    if type(value) is Call and name_of(value.function) == _SIZE:
        (value,) = _arguments(value, 1)
    if not isinstance(value, tuple | list):
        raise ValueError(f"sizes or strides were expected, not {described_value(value)}")
    if len(value) > MAX_DIMENSIONS:
        raise ValueError(f"{len(value)} dimensions")
    if not all(is_count(number) for number in value):
        raise ValueError(f"sizes or strides were expected, not {described_value(value)}")
    return tuple(value)


def open_all(plans: list[TensorPlan], timeout_s: float) -> list[Tensor]:
    """Attach the planned tensors; a storage that was sent once is attached once. Raises ValueError where one shared
    memory has two sizes, before any is attached, and TransferFailed."""
    _check_sizes(plans)
    storages: dict[StoragePlan, torch.UntypedStorage] = {}
    uuids = visible_uuids() if any(isinstance(plan, CudaHandle) for plan in plans) else []
    tensors: list[Tensor] = []
    for plan in plans:
        if isinstance(plan, CudaHandle):
            tensors.append(plan.open(uuids, f"tensor {len(tensors)} of the payload"))
            continue
        if plan.storage not in storages:
            storages[plan.storage] = plan.storage.attach(timeout_s)
        empty = torch.empty(0, dtype=plan.dtype)
        tensors.append(empty.set_(storages[plan.storage], plan.offset, plan.shape, plan.stride))
    return tensors


def _check_sizes(plans: list[TensorPlan]) -> None:
    """Check that each shared memory has one size: torch would keep the first, and fail at the second."""
    sizes: dict[object, int] = {}
    for plan in plans:
        storage = None if isinstance(plan, CudaHandle) else plan.storage
        if isinstance(storage, NamedStorage | DescriptorStorage):
            size = sizes.setdefault(storage.memory, storage.num_bytes)
            if size != storage.num_bytes:
                named = " at ".join(shown(part) for part in storage.memory)
                raise ValueError(f"shared memory {named} is sent with {size} bytes and with {storage.num_bytes}")
