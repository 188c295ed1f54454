"""The fields of vLLM's weight updates, and the ways in which a trainer's tensors come.

`init_info` chooses the way: the address of a group, or a NCCL id, means broadcasts of rank 0, as of vLLM's NCCL engine;
an `init_info` without one means handles of the trainer's memory on this host, as of its IPC engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from ....weight_sync.group.communicator import unique_id_of
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
    nccl_unique_id_b64: str | None = Field(None, description="in place of an address: base64 of the trainer's NCCL id")
    packed: bool = Field(False, description="tensors come in buffers of bytes")
    packed_buffer_size_bytes: BufferBytes = BUFFER_BYTES


class InitBody(AdminBody):
    """Fields of POST /init_weight_transfer_engine."""

    init_info: InitInfo


class UpdateInfo(Body):
    """The tensors that follow, in their order. Broadcasts without any are of the tensors of the update before."""

    names: list[str] = Field(default_factory=list)
    dtype_names: list[str] = Field(default_factory=list)
    shapes: list[list[Count]] = Field(default_factory=list)
    packed: bool | None = Field(None, description="of older clients: instead of init_info's")
    packed_buffer_size_bytes: BufferBytes | None = None
    ipc_handles_pickled: str | None = Field(None, description="base64 of pickled handles, see SECURITY.md")
    tensor_sizes: list[Count] | None = Field(None, description="bytes of each tensor in a packed handle")


class UpdateBody(AdminBody):
    """Fields of POST /update_weights. A list has an entry for each rank, all of the same tensors."""

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: str | None = Field(None, description="prime-rl's: a folder of safetensors, committed at once")
    weight_version: str | None = Field(None, description="with weight_dir")
    client: str | None = Field(None, description="Lockstep's own: that of the start")


@dataclass(frozen=True)
class Update:
    """The checked fields of an update."""

    body: UpdateBody
    info: UpdateInfo | None  # None: a folder
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Place:
    """This engine's place in a trainer's group."""

    rank_offset: int
    world_size: int
    address: tuple[str, int] | None  # of the group's store; None: the trainer has a NCCL id, and no store
    nccl_unique_id_b64: str | None

    def join(self, service: RolloutService, seconds_left: float | None) -> None:
        """Join the group: the NCCL communicator of vLLM's trainers where the model is on a GPU, else a group of
        torch.distributed over gloo. The trainer must know which: the two find each other by other keys."""
        host, port = self.address or (None, None)
        if service.communicators is not None:
            service.join_vllm_trainer(
                self.rank_offset, self.world_size, master_address=host, master_port=port,
                nccl_unique_id_b64=self.nccl_unique_id_b64, timeout_s=seconds_left,
            )  # fmt: skip
            return
        assert host is not None and port is not None
        service.init_weights_update_group(
            host, port, self.rank_offset, self.world_size, GROUP_NAME, "gloo", timeout_s=seconds_left
        )


@dataclass(frozen=True)
class Broadcasts:
    """Broadcasts of rank 0 of the group `GROUP_NAME`."""

    buffer_bytes: int | None  # of packed tensors; None: one broadcast for each tensor
    place: Place | None = None  # None: before the first init

    def receive(self, service: RolloutService, update: Update, seconds_left: float | None) -> None:
        """Receive the tensors."""
        assert update.info is not None
        if update.info.ipc_handles_pickled is not None:
            raise BadField("update_info.ipc_handles_pickled", "the engine was told to join a group; init it without")
        load_format = None if self._size(update.info) is None else "flattened_bucket"
        for specs in self.parts(update):
            service.update_weights_from_distributed(
                *lists_of(specs), GROUP_NAME, load_format=load_format, client=update.body.client,
                timeout_s=seconds_left,
            )  # fmt: skip

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
            client=update.body.client, timeout_s=seconds_left,
        )  # fmt: skip


Way = Broadcasts | Handles


def with_tensors(update: Update, way: Way, before: tuple[TensorSpec, ...]) -> Update:
    """Return an update with its tensors: those of the update before where it names none, as trainers of vLLM 0.33 do
    from the second one on. Raises BadField where there were none."""
    if update.info is None or update.info.names or isinstance(way, Handles):
        return update
    if not before:
        raise BadField("update_info.names", "are needed: no update since the init has told any tensors")
    return replace(update, specs=before)


def way_of(info: InitInfo, has_nccl: bool) -> Way:
    """Return the way that an `init_info` chooses. has_nccl: the model is on a GPU. Raises BadField where it is not
    complete, contradicts itself, or is not supported."""
    unique_id = info.nccl_unique_id_b64 or None
    by_address = unique_id is None
    if not by_address:
        _check_unique_id(info, has_nccl)
    names = (*(("master_address", "master_port") if by_address else ()), "rank_offset", "world_size")
    group = {name: getattr(info, name) for name in names}
    missing = [name for name, value in group.items() if value is None]
    if by_address and len(missing) == len(group):
        return Handles()
    if missing:
        raise BadField(f"init_info.{missing[0]}", "is needed for a group")
    if has_nccl and group["rank_offset"] < 1:
        raise BadField("init_info.rank_offset", "must be at least 1, since rank 0 is the trainer")
    if has_nccl and group["rank_offset"] >= group["world_size"]:
        raise BadField("init_info.world_size", f"leaves no rank {group['rank_offset']} (rank_offset)")
    address = (group["master_address"], group["master_port"]) if by_address else None
    buffer_bytes = info.packed_buffer_size_bytes if info.packed else None
    return Broadcasts(buffer_bytes, Place(group["rank_offset"], group["world_size"], address, unique_id))


def _check_unique_id(info: InitInfo, has_nccl: bool) -> None:
    field = "init_info.nccl_unique_id_b64"
    if not has_nccl:
        raise BadField(
            field, "needs NCCL, and so a model on a GPU; this one is on a CPU: name a gloo group's master_address "
            "and master_port"
        )  # fmt: skip
    if info.master_address is not None or info.master_port is not None:
        raise BadField(field, "stands in place of master_address and master_port: give one of both, not both")
    try:
        unique_id_of(info.nccl_unique_id_b64 or "")
    except ValueError as error:
        raise BadField(field, str(error)) from None


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
