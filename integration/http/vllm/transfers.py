"""The fields of vLLM's weight updates, and the ways in which a trainer's tensors come.

`init_info` chooses the way: a group's address means broadcasts of rank 0, as of vLLM's NCCL engine; an `init_info`
without one means handles of the trainer's memory on this host, as of its IPC engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ....weight_sync.group.vllm_protocol import BUFFER_BYTES, GROUP_NAME, packed_buffers
from ....weight_sync.manifest import TensorSpec, dtype_name, parse_dtype, specs_from_lists
from ...service import RolloutService
from ..edge.bodies import AdminBody, Body, Count, fields_of
from ..edge.errors import BadField

Port = Annotated[int, Field(ge=0, le=65535)]
BufferBytes = Annotated[int, Field(ge=1)]


class InitInfo(Body):
    """The group that is joined, with the names of vLLM's NCCL engine; without any of them: handles of memory."""

    master_address: str | None = None
    master_port: Port | None = None
    rank_offset: Count | None = None
    world_size: Count | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = Field(False, description="tensors come in buffers of bytes")
    packed_buffer_size_bytes: BufferBytes = BUFFER_BYTES


class InitBody(AdminBody):
    """Fields of POST /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(Body):
    """The tensors that follow, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[Count]]
    packed: bool | None = Field(None, description="of older clients: instead of init_info's")
    packed_buffer_size_bytes: BufferBytes | None = None
    ipc_handles_pickled: str | None = Field(None, description="base64 of pickled handles, see SECURITY.md")
    tensor_sizes: list[Count] | None = Field(None, description="bytes of each tensor in a packed handle")


class UpdateBody(AdminBody):
    """Fields of POST /update_weights. A list has an entry for each rank, all of the same tensors."""

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: str | None = Field(None, description="prime-rl's: a folder of safetensors, committed at once")
    weight_version: str | None = Field(None, description="with weight_dir")


@dataclass(frozen=True)
class Update:
    """The checked fields of an update."""

    body: UpdateBody
    info: UpdateInfo | None  # None: a folder
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Broadcasts:
    """Broadcasts of rank 0 of the group `GROUP_NAME`."""

    buffer_bytes: int | None  # of packed tensors; None: one broadcast for each tensor

    def receive(self, service: RolloutService, update: Update, seconds_left: float | None) -> None:
        """Receive the tensors."""
        assert update.info is not None
        if update.info.ipc_handles_pickled is not None:
            raise BadField("update_info.ipc_handles_pickled", "the engine was told to join a group; init it without")
        load_format = None if self._size(update.info) is None else "flattened_bucket"
        for specs in self.parts(update):
            service.update_weights_from_distributed(
                *lists_of(specs), GROUP_NAME, load_format=load_format, timeout_s=seconds_left
            )

    def parts(self, update: Update) -> list[tuple[TensorSpec, ...]]:
        """Divide the tensors as their sender does."""
        assert update.info is not None
        size = self._size(update.info)
        return [update.specs] if size is None else list(packed_buffers(update.specs, size))

    def _size(self, info: UpdateInfo) -> int | None:
        is_packed = self.buffer_bytes is not None if info.packed is None else info.packed
        return (info.packed_buffer_size_bytes or self.buffer_bytes or BUFFER_BYTES) if is_packed else None


@dataclass(frozen=True)
class Handles:
    """Handles of the trainer's memory on this host."""

    def receive(self, service: RolloutService, update: Update, seconds_left: float | None) -> None:
        """Copy the tensors from the trainer's memory."""
        assert update.info is not None
        if update.info.ipc_handles_pickled is None:
            raise BadField("update_info.ipc_handles_pickled", "is needed: the engine was not told to join a group")
        service.update_weights_from_ipc(
            *lists_of(update.specs), update.info.ipc_handles_pickled, tensor_sizes=update.info.tensor_sizes,
            timeout_s=seconds_left,
        )  # fmt: skip


Way = Broadcasts | Handles


def way_of(info: InitInfo) -> Way:
    """Return the way that an `init_info` chooses. Raises BadField where it is not complete, or not supported."""
    if info.nccl_unique_id_b64 is not None:
        raise BadField(
            "init_info.nccl_unique_id_b64", "is not supported: name the group's master_address and _port"
        )  # fmt: skip
    group = {name: getattr(info, name) for name in ("master_address", "master_port", "rank_offset", "world_size")}
    missing = [name for name, value in group.items() if value is None]
    if len(missing) == len(group):
        return Handles()
    if missing:
        raise BadField(f"init_info.{missing[0]}", "is needed for a group")
    return Broadcasts(info.packed_buffer_size_bytes if info.packed else None)


def read_update(values: dict[str, object]) -> Update:
    """Read and check the fields of an update. Raises BadField."""
    body = fields_of(UpdateBody, values)
    given = body.update_info
    if given is None:
        if body.weight_dir is None:
            raise BadField("update_info", "is needed: names, dtype_names and shapes of the tensors")
        return Update(body, None, ())
    infos = given if isinstance(given, list) else [given]
    if not infos or any(info != infos[0] for info in infos):
        raise BadField("update_info", "must have the same tensors for every rank")
    info = infos[0]
    for dtype in set(info.dtype_names):
        try:
            parse_dtype(dtype)
        except ValueError as error:
            raise BadField("update_info.dtype_names", str(error)) from None
    try:
        return Update(body, info, specs_from_lists(info.names, info.dtype_names, info.shapes))
    except ValueError as error:
        raise BadField("update_info", str(error)) from None


def lists_of(specs: Sequence[TensorSpec]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, dtypes and shapes of tensors, as the verbs take them."""
    dtypes = [dtype_name(spec.dtype) for spec in specs]
    return [spec.name for spec in specs], dtypes, [list(spec.shape) for spec in specs]
