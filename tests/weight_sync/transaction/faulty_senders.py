"""Senders with one fault, on every path of weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.integration.bench.parts.ports import HOST, free_ports
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.push.remote_engine import RemoteTarget
from lockstep.tests.support.forked_ranks import join_group
from lockstep.tests.weight_sync.transaction.two_states import (
    BUCKET,
    CALL_S,
    DELTA_BUCKET,
    LATE_S,
    SHM_BUCKET,
    Request,
    State,
    Weights,
)
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import DATA_FILE, DEFAULT_BUFFER_BYTES, pack_chunks
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.group.plan import plan_broadcasts
from lockstep.weight_sync.group.weight_group import WeightGroup
from lockstep.weight_sync.layout.bucket import byte_view, plan_buckets
from lockstep.weight_sync.manifest import TensorSpec, dtype_name, specs_of
from lockstep.weight_sync.same_host.segment import HEADER_BYTES
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport, read_from
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport
from lockstep.weight_sync.transports.transport import Sent


@dataclass
class Fault:
    """One fault that happens once. kind "none": no fault.

    unit: the bucket, broadcast, shard or request that it hits; `within` it, or at its beginning. A unit past the last
    one is the verb `end_weight_update`.
    """

    path: str
    kind: str
    unit: int = 0
    within: bool = False
    counts: bool = True  # False: not yet, because this is another update
    armed: bool = True
    note: Callable[[], None] = field(default=lambda: None)  # reports to the engine's process that the fault happens

    def __str__(self) -> str:
        return f"{self.path}: {self.kind} {'within' if self.within else 'before'} unit {self.unit}"

    def hits(self, *kinds: str, unit: int, within: bool | None = None) -> bool:
        """Return whether the fault is of one of these kinds and due now; if so it has happened."""
        here = self.armed and self.counts and self.kind in kinds and unit == self.unit and within in (None, self.within)
        if here:
            self.armed = False
            self.note()
        return here

    def strike(self, unit: int, within: bool) -> None:
        """Kill or stop this process, if the fault is one of these and due here."""
        if self.hits("kill", "hang", unit=unit, within=within):
            # Sent to this thread: after a signal to the process it may still run for a moment.
            number = signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP
            signal.pthread_kill(threading.get_ident(), number)


def flipped(data: Tensor, within: bool) -> Tensor:
    """Return a copy with one bit changed, in the middle or in the last byte."""
    copy = data.clone()
    byte_view(copy)[copy.nbytes // 2 if within else -1] ^= 1
    return copy


class FaultyGroup:
    """A group whose broadcasts fail; everything else is the group's own."""

    def __init__(self, group: WeightGroup, fault: Fault) -> None:
        self._group, self._fault = group, fault
        self._num_broadcasts = 0
        self._is_cut = False
        self._last = torch.zeros(1)

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    @property
    def num_updates(self) -> int:
        return self._group.num_updates

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        self._group.num_updates = value

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> object:
        """Start a broadcast, faulty where due. The faults keep the size, because gloo ends a process that receives more
        than it expects."""
        fault, unit = self._fault, self._num_broadcasts
        if not fault.counts:
            return self._group.broadcast(tensor, deadline), tensor
        self._num_broadcasts += 1
        fault.strike(unit, within=False)
        if self._is_cut or fault.hits("drop", unit=unit):
            self._is_cut = True  # and all later ones, which would else arrive in each other's places
            return None
        if fault.hits("corrupt", unit=unit):
            tensor = flipped(tensor, fault.within)
        if fault.hits("duplicate bucket", unit=unit):
            tensor = byte_view(self._last).repeat(2 + tensor.nbytes // self._last.nbytes)[: tensor.nbytes]
            tensor = tensor.clone().view(self._last.dtype)
        self._last = tensor.clone()
        work = self._group.broadcast(tensor, deadline)
        fault.strike(unit, within=True)
        return work, tensor

    def finish(self, started: object, deadline: Deadline) -> None:
        if started is not None:
            self._group.finish(started[0], deadline)  # type: ignore[index]


class FaultyDistributed(DistributedTransport):
    """Our own protocol over a faulty group."""

    def __init__(self, fault: Fault, bucket_bytes: int) -> None:
        super().__init__(bucket_bytes=bucket_bytes)
        self._fault = fault

    def _joined(self, targets: Sequence[object], timeout_s: float) -> WeightGroup:
        return FaultyGroup(super()._joined(targets, timeout_s), self._fault)  # type: ignore[arg-type,return-value]


class ShardedDisk(DiskTransport):
    """A transport over a checkpoint of several shards."""

    def send(self, targets: Sequence[object], manifest: object, tensors: object, timeout_s: float) -> Sent:
        with self.new_folder() as path:
            save_folder(path, tensors, manifest.version, max_shard_bytes=BUCKET)  # type: ignore[arg-type,attr-defined]
            read_from(path, targets, timeout_s)  # type: ignore[arg-type]
        return Sent(0)


class FaultyTarget(RemoteTarget):
    """The engine behind requests that fail: the faults of shared memory, disk and the session."""

    def __init__(self, path: Path, fault: Fault, num_units: int) -> None:
        super().__init__(path, "engine")
        self._socket, self._fault, self._num_units = path, fault, num_units
        self._num_requests = 0

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        fault = self._fault
        if verb == "update_weights_from_tensor" and fault.counts:
            unit = self._num_requests
            self._num_requests += 1
            fault.strike(unit, within=False)
            if fault.hits("drop", unit=unit, within=False):
                return {}
            (description,) = arguments["descriptions"]  # type: ignore[misc]
            arguments["descriptions"] = [_spoilt_description(description, fault, unit)]
            if fault.hits("duplicate bucket", unit=unit):
                super().call(verb, timeout_s=timeout_s, **arguments)
            self._strike_within(unit, verb, timeout_s, arguments)
        elif verb == "update_weights_from_disk" and fault.counts:
            _spoil_folder(Path(arguments["model_path"]), fault, self._num_units)  # type: ignore[arg-type]
            if fault.path == "delta by disk":
                for unit in range(self._num_units):
                    fault.strike(unit, within=False)
                    self._strike_within(unit, verb, timeout_s, arguments)
        elif verb == "end_weight_update":
            fault.strike(self._num_units, within=False)
            self._strike_within(self._num_units, verb, timeout_s, arguments)
        if fault.hits(f"no answer to {verb}", unit=0):
            super().call(verb, timeout_s=timeout_s, **arguments)
            raise TargetError(self.name, verb, "the answer was lost")
        return super().call(verb, timeout_s=timeout_s, **arguments)

    def _strike_within(self, unit: int, verb: str, timeout_s: float, arguments: Request) -> None:
        fault = self._fault
        is_now = fault.counts and fault.unit == unit and fault.within
        if is_now and fault.kind in ("kill", "hang"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(str(self._socket))
                request = {"verb": verb, "timeout_s": timeout_s, "arguments": arguments}
                connection.sendall(json.dumps(request).encode() + b"\n")
                fault.strike(unit, within=True)


def _spoilt_description(description: Request, fault: Fault, unit: int) -> Request:
    """Return a description of a bucket with a fault in the description or in the packed bytes."""
    keys = ("names", "dtypes", "shapes", "pieces")
    parts: dict[str, list] = {key: list(description[key]) for key in keys}  # type: ignore[arg-type]
    at = -1 if fault.within else 0
    if fault.hits("drop", unit=unit):
        parts = {key: values[:-1] for key, values in parts.items()}
    elif fault.hits("wrong shape", unit=unit):
        parts["shapes"][at] = [*parts["shapes"][at], 2]
    elif fault.hits("unknown name", unit=unit):
        parts["names"][at] = "nobody.weight"
    elif fault.hits("duplicate", unit=unit):
        parts = {key: [*values, values[at]] for key, values in parts.items()}
    elif fault.hits("corrupt", unit=unit):
        _, offset, num_bytes = parts["pieces"][at]
        _flip_in_file(Path(str(description["path"])), HEADER_BYTES + offset + num_bytes // 2)
    return {**description, **parts}


def _spoil_folder(path: Path, fault: Fault, num_units: int) -> None:
    """Damage a checkpoint or a delta after it was written."""
    shards = sorted(path.glob("*.safetensors"))
    for unit, file in enumerate(shards or [path / DATA_FILE] * num_units):
        size = file.stat().st_size
        share = size // (1 if shards else num_units)
        start = size - share if shards else unit * share
        spot = start + (share // 2 if fault.within else share - 1)
        if fault.hits("corrupt", unit=unit):
            _flip_in_file(file, spot)
        elif fault.hits("duplicate bucket", unit=unit):
            data = file.read_bytes()
            file.write_bytes(data[: start + share] + data[start:])
        elif fault.hits("drop", unit=unit, within=True):
            os.truncate(file, spot)
        elif fault.hits("drop", unit=unit, within=False):
            if shards:
                file.unlink()
            else:
                data = file.read_bytes()
                file.write_bytes(data[:start] + data[start + share :])


def _flip_in_file(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def spoilt_tensors(weights: Weights, fault: Fault, units: Sequence[Sequence[str]]) -> list[tuple[str, Tensor]]:
    """Return the trainer's tensors with one of them changed, misnamed, or doubled."""
    named = list(weights.items())
    if fault.kind in ("wrong shape", "unknown name", "duplicate") and fault.unit < len(units):
        victim = units[fault.unit][-1 if fault.within else 0]
        index = [name for name, _ in named].index(victim)
        tensor = weights[victim]
        if fault.hits("wrong shape", unit=fault.unit):
            named[index] = victim, torch.cat([tensor, tensor])
        elif fault.hits("unknown name", unit=fault.unit):
            named[index] = "nobody.weight", tensor
        elif fault.hits("duplicate", unit=fault.unit):
            named.insert(index, (victim, tensor))
    return named


def striking(named: Iterable[tuple[str, Tensor]], fault: Fault, units: Sequence[Sequence[str]]) -> Iterator:
    """Yield the tensors as they are gathered. The sender is killed before the first tensor of a unit, or before its
    last."""
    for name, tensor in named:
        for unit, names in enumerate(units):
            if name == names[0]:
                fault.strike(unit, within=False)
            if name == names[-1]:
                fault.strike(unit, within=True)
        yield name, tensor


# -- the senders ------------------------------------------------------------------------------------------------------


def push(fault: Fault, engine: Path, folder: Path, old: State, new: State, version: str) -> str:
    """Send by our own `WeightPusher` over any transport. Returns "" or the reason of the failure."""
    units = units_of(fault.path, old, new)
    target = FaultyTarget(engine, fault, len(units))
    transport = {
        "distributed": lambda: FaultyDistributed(fault, BUCKET),
        "shared memory": lambda: TensorTransport(bucket_bytes=SHM_BUCKET),
        "disk": lambda: ShardedDisk(folder),
        "delta by group": lambda: DeltaTransport(FaultyDistributed(fault, DELTA_BUCKET)),
        "delta by memory": lambda: DeltaTransport(TensorTransport(bucket_bytes=2 * DELTA_BUCKET)),
        "delta by disk": lambda: DeltaTransport(DiskTransport(folder)),
    }[fault.path]()
    pusher = WeightPusher([target], transport, timeout_s=CALL_S)
    if fault.path.startswith("delta"):
        fault.counts = False
        pusher.push_tensors(old.weights.items(), old.specs, f"{version} base")
        fault.counts = True
    # In shared memory, and over a delta, the fault is in the receiver's request; else in the trainer's tensors.
    at_the_wire = fault.path == "shared memory"
    named = list(new.weights.items()) if at_the_wire else spoilt_tensors(new.weights, fault, units)
    given = striking(named, fault, units) if fault.path == "disk" else named
    try:
        pusher.push_tensors(given, specs_of(named), version)
    except PushFailed as error:
        return f"stranded: {error}" if error.stranded else str(error)
    finally:
        pusher.close()
    return ""


def send_as_a_framework(fault: Fault, engine: Path, folder: Path, old: State, new: State, version: str) -> str:
    """Send as a foreign framework: requests with names, shapes and dtypes, and bare broadcasts. Returns "" or the
    reason of the failure.

    One tensor a broadcast: one request, which waits for its commit by `continue_generation`. Flattened buckets: one
    request for each, in a session.
    """
    flat = fault.path == "flattened buckets"
    units = units_of(fault.path, old, new)
    target = FaultyTarget(engine, fault, len(units))
    call = partial(target.call, timeout_s=CALL_S)
    call("pause_generation", mode="retract")
    call("flush_cache")
    if flat:
        call("begin_weight_update", weight_version=version, lease_s=2 * CALL_S)
    (port,), name = free_ports(1), f"trainer {version}"
    group_arguments = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = Background(partial(call, "init_weights_update_group", **group_arguments, group_name=name, backend="gloo"))
    group = FaultyGroup(join_group(HOST, port, 0, 2, name, timeout_s=CALL_S), fault)
    joining.result()
    roots = {name: root.hex() for name, root in tensor_roots(new.weights.items()).items()}
    requests = units if flat else [[name for unit in units for name in unit]]
    error = ""
    try:
        for number, names in enumerate(requests):
            tensors = [(name, new.weights[name]) for name in names]
            lists = _request(tensors, fault, number if flat else None)
            receiving = Background(
                partial(
                    call, "update_weights_from_distributed", **lists, group_name=name, weight_version=version,
                    load_format="flattened_bucket" if flat else None, verify={n: roots[n] for n in names},
                )
            )  # fmt: skip
            parts = [torch.cat([byte_view(t) for _, t in tensors])] if flat else [t for _, t in tensors]
            try:
                for part in parts:
                    deadline = Deadline.after(CALL_S)
                    group.finish(group.broadcast(part, deadline), deadline)
            finally:
                receiving.result()
        if flat:
            call("end_weight_update")
        else:
            fault.strike(len(units), within=False)
            call("continue_generation")
            fault.strike(len(units), within=True)
    except (RuntimeError, ValueError) as failure:
        error = str(failure)
        if flat:
            call("abort_weight_update")
    call("destroy_weights_update_group", group_name=name)
    return error


def _request(tensors: list[tuple[str, Tensor]], fault: Fault, number: int | None) -> dict[str, list]:
    """Return the three lists of a request, one of which may be wrong. number: of the unit; None: each tensor is a
    unit."""
    names, shapes = [name for name, _ in tensors], [list(tensor.shape) for _, tensor in tensors]
    dtypes = [dtype_name(tensor.dtype) for _, tensor in tensors]
    for index in range(len(tensors)):
        unit = index if number is None else number
        index = index if number is None or not fault.within else len(tensors) - 1
        if fault.hits("wrong shape", unit=unit):
            shapes[index] = shapes[index][::-1] if len(set(shapes[index])) > 1 else [*shapes[index], 2]
        elif fault.hits("unknown name", unit=unit):
            names[index] = "nobody.weight"
        elif fault.hits("duplicate", unit=unit):
            names, dtypes, shapes = ([*values, values[index]] for values in (names, dtypes, shapes))
    return {"names": names, "dtypes": dtypes, "shapes": shapes}


class Background:
    """A call in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            self._error = error

    def result(self) -> None:
        self._thread.join(CALL_S + LATE_S)
        if self._thread.is_alive():
            raise TransferFailed("the engine has not answered")
        if self._error is not None:
            raise self._error


SENDERS = dict.fromkeys(
    ("distributed", "shared memory", "disk", "delta by group", "delta by memory", "delta by disk"), push
) | dict.fromkeys(("tensor by tensor", "flattened buckets"), send_as_a_framework)


def units_of(path: str, old: State, new: State) -> list[list[str]]:
    """Return the units in which a path sends: the names of their tensors, in order."""
    if path == "tensor by tensor":
        return [[name] for name in new.weights]
    if path == "distributed":
        return [list(plan.names) for plan in plan_broadcasts(new.specs, BUCKET)]
    if path in ("shared memory", "flattened buckets"):
        return _whole([list(plan.names) for plan in plan_buckets(new.specs, BUCKET)])
    if path == "disk":
        return _shards(new.specs)
    (stream,) = pack_chunks(list(encode_delta(old.weights, new.weights.items())), DEFAULT_BUFFER_BYTES)
    num_buckets = len(plan_buckets([TensorSpec.of("delta 0", stream)], DELTA_BUCKET))
    names = list(new.weights)
    return [[names[index % len(names)]] for index in range(num_buckets)]


def _whole(units: list[list[str]]) -> list[list[str]]:
    assert sum(map(len, units)) == len({name for unit in units for name in unit}), "a tensor is cut"
    return units


def _shards(specs: Sequence[TensorSpec]) -> list[list[str]]:
    units: list[list[str]] = [[]]
    num_bytes = 0
    for spec in specs:
        if num_bytes and num_bytes + spec.num_bytes > BUCKET:
            units.append([])
            num_bytes = 0
        units[-1].append(spec.name)
        num_bytes += spec.num_bytes
    return units
