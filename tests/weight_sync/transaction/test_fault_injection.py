"""Every path of weights with faults at every bucket boundary and within every bucket, of every kind.

An engine and its verbs run in one process. The sender is a fork for each injection and calls the verbs over a socket.
Afterwards the engine has exactly the old weights or exactly the new ones, reports which, generates from them or reports
the reason to refuse, and no process has waited beyond a deadline.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from lockstep.integration.bench.parts.chaos import HOST, Forked, free_ports
from lockstep.integration.push.local_target import run_verb
from lockstep.integration.push.pusher import PushFailed, WeightPusher
from lockstep.integration.push.remote_engine import RemoteTarget, VerbServer
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import join_group
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import DATA_FILE, DEFAULT_BUFFER_BYTES, pack_chunks
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.errors import Poisoned, SessionError, TransferFailed
from lockstep.weight_sync.group.plan import plan_broadcasts
from lockstep.weight_sync.group.weight_group import WeightGroup
from lockstep.weight_sync.layout.bucket import byte_view, plan_buckets
from lockstep.weight_sync.manifest import TensorSpec, dtype_name, specs_of
from lockstep.weight_sync.same_host.segment import HEADER_BYTES
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transaction.lease import LEASE_THREAD
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport, read_from
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport
from lockstep.weight_sync.transports.transport import Sent

CALL_S = 1.0  # deadline of every call
LATE_S = 3.0  # past a deadline: time to exchange the reasons, on a machine that does other work too
NUM_ATTEMPTS = 3
NUM_LANES = 9  # engines at a time: most of them wait for a deadline
SUITE_S = 400.0  # for all injections together: five times their usual time
BUCKET = 48 << 10
SHM_BUCKET = 2 * BUCKET  # a bucket is two halves of it
DELTA_BUCKET = 14 << 10
PROMPT = [3, 1, 4, 1, 5, 9]
NUM_TOKENS = 4

Weights = dict[str, Tensor]
Request = Mapping[str, object]


# -- the model and its two states -------------------------------------------------------------------------------------


def tiny_model() -> nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(1.0, 0.1)  # all elements differ, so that one in another's place is noticed
    return model


def changed(weights: Weights) -> Weights:
    """Return weights in which every tensor differs, in few elements or in many; their deltas are of every kind."""
    generator = torch.Generator().manual_seed(2)
    result = {}
    for index, (name, tensor) in enumerate(weights.items()):
        mask = torch.rand(tensor.shape, generator=generator) < (0.02, 0.1, 0.5)[index % 3]
        mask.view(-1)[0] = True
        result[name] = torch.where(mask, tensor + torch.randn(tensor.shape, generator=generator), tensor)
    return result


@torch.no_grad()
def greedy(model: nn.Module, weights: Weights) -> list[int]:
    """Return transformers' greedy tokens with these weights."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@dataclass(frozen=True)
class State:
    """Weights, and the expected reports of an engine that holds them."""

    weights: Weights = field(repr=False)
    digest: str
    tokens: list[int]

    @classmethod
    def of(cls, weights: Weights) -> State:
        return cls(weights, model_digest(weights.items()), greedy(tiny_model(), weights))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return specs_of(self.weights.items())


def two_states() -> tuple[State, State]:
    first = {name: parameter.detach().clone() for name, parameter in tiny_model().named_parameters()}
    states = State.of(first), State.of(changed(first))
    assert states[0].tokens != states[1].tokens
    return states


# -- faults, at the sender's end --------------------------------------------------------------------------------------


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


# -- the engine's process ---------------------------------------------------------------------------------------------


class EngineUnderTest:
    """A real engine behind a socket, and the records of its calls."""

    def __init__(self, folder: Path, states: tuple[State, State], lane: int) -> None:
        model = tiny_model()
        config = EngineConfig(kv_cache="16 blocks", max_num_seqs=2, max_num_batched_tokens=32)
        self.service = RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=CALL_S))
        self.folder, self.path = folder, folder / f"{lane}.sock"
        self.states, self.current, self.version = states, 0, self.service.engine.weight_version
        self.latest_s = 0.0  # the longest time by which a call passed its deadline
        self._num_calls, self._idle = 0, threading.Condition()
        self._server = VerbServer(self.path, self._run)
        self._server.start()

    def _run(self, verb: str, timeout_s: float, arguments: dict[str, object]) -> dict[str, object]:
        with self._idle:
            self._num_calls += 1
        started = time.monotonic()
        try:
            return run_verb(self.service, verb, timeout_s, arguments)
        finally:
            late_s = time.monotonic() - started - timeout_s
            with self._idle:
                self.latest_s = max(self.latest_s, late_s)
                self._num_calls -= 1
                self._idle.notify_all()

    def inject(self, fault: Fault, version: str) -> str:
        """Run a sender with that fault. Returns whether the weights are the old ones or the new ones after it.

        A sender that fails before its fault, because another process took its port meanwhile, is run again.
        """
        for attempt in range(NUM_ATTEMPTS):
            landed, happened, said = self._inject(fault, f"{version}.{attempt}")
            if happened:
                return landed
            assert landed == "old", f"{fault}: it did not happen"
        raise AssertionError(f"{fault}: it did not happen; {said}")

    def _inject(self, fault: Fault, version: str) -> tuple[str, bool, str]:
        """Run one attempt and return the outcome, whether the fault happened, and the sender's report."""
        old, new = self.states[self.current], self.states[1 - self.current]
        reader, writer = os.pipe()
        fault.note = lambda: os.write(writer, b".")
        sender = Forked(partial(SENDERS[fault.path], fault, self.path, self.folder, old, new, version))
        os.close(writer)
        try:
            happened = self._watch(sender, fault, reader)
            self._settle(str(fault))
            landed = self._check(fault, sender, version)
        finally:
            os.close(reader)
            sender.end()
        if landed == "new":
            self.current = 1 - self.current
        return landed, happened, str(sender.result)

    def _watch(self, sender: Forked, fault: Fault, news: int) -> bool:
        """Wait until the sender is gone, or stopped where it should stop. Returns whether the fault happened."""
        limit_s = 3 * (CALL_S + LATE_S)
        # The report comes right before the fault; a sender that ends without a fault closes the pipe.
        assert _is_readable(news, limit_s), f"{fault}: the sender waits beyond its deadlines"
        happened = os.read(news, 1) == b"."
        if not (happened and fault.kind == "hang"):
            assert sender.wait(limit_s), f"{fault}: the sender waits beyond its deadlines"
        assert sender.error is None, f"{fault}: {sender.error}"
        return happened or (fault.kind == "none" and sender.result == "")

    def _settle(self, what: str) -> None:
        """Wait until no verb runs, and until a session without a client has expired."""
        with self._idle:
            is_idle = self._idle.wait_for(lambda: self._num_calls == 0, 2 * CALL_S + LATE_S)
        assert is_idle, f"{what}: the engine waits beyond its deadlines"
        assert self.latest_s < LATE_S, f"{what}: a call took {self.latest_s:.1f} s longer than its deadline"
        for thread in threading.enumerate():
            if thread.name == LEASE_THREAD:
                thread.join(2 * CALL_S + LATE_S)
                assert not thread.is_alive(), f"{what}: the session outlives its lease"

    def _check(self, fault: Fault, sender: Forked, version: str) -> str:
        """Check that the engine has the old weights or the new ones, reports which, and generates from them."""
        engine = self.service.engine
        for name, state in self.service.groups.state().items():  # groups that a killed sender leaves
            assert state
            self.service.destroy_weights_update_group(name)
        if self.service.state()["weight_update"]["state"] == "rolled_back":
            self._acknowledge()
        if engine.is_paused:
            self.service.continue_generation()
        base = {f"{version} base": self.current} if fault.path.startswith("delta") else {}
        known = {self.version: self.current, **base, version: 1 - self.current}
        assert engine.weight_version in known, f"{fault}: {engine.weight_version} is neither version"
        holds = self.states[known[engine.weight_version]]
        assert self.service.model_digest() == holds.digest, f"{fault}: torn, or labelled wrongly"
        assert engine.weight_digest in (holds.digest, None if engine.weight_version == "default" else holds.digest)
        assert engine.refusal is None, f"{fault}: {engine.refusal}"
        assert self.generate() == holds.tokens, f"{fault}: tokens of other weights"
        self.version = engine.weight_version
        landed = "new" if engine.weight_version == version else "old"
        if sender.finished:
            assert "stranded" not in sender.result, f"{fault}: {sender.result}"
            assert (landed == "new") == (sender.result == ""), f"{fault}: {landed}, the sender says {sender.result!r}"
        return landed

    def _acknowledge(self) -> None:
        """Accept that a session ended without its client: until then only another session may write."""
        try:
            self.service.abort_weight_update()
        except SessionError:
            return  # its client knew

    def generate(self) -> list[int]:
        (completion,) = self.service.engine.generate(
            [PROMPT], SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
        )
        return list(completion.token_ids)

    def close(self) -> None:
        self._server.close()
        self.service.close()


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def run_lane(
    faults: Sequence[Fault], folder: Path, states: tuple[State, State], lane: int
) -> list[tuple[str, str, str]]:
    """Run all of these faults on one engine, one after the other. Returns path, kind and outcome of each."""
    engine, rows = EngineUnderTest(folder, states, lane), []
    try:
        for number, fault in enumerate(faults):
            landed = engine.inject(fault, f"{number}")
            rows.append((fault.path, fault.kind, landed))
            assert landed in expected_outcome(fault, states), f"{fault}: {landed}"
    finally:
        engine.close()
    return rows


def expected_outcome(fault: Fault, states: tuple[State, State]) -> tuple[str, ...]:
    """Return the possible outcomes. Only a sender that runs until the commit gives the new weights."""
    if fault.kind == "none":
        return ("new",)
    if (fault.path, fault.kind, fault.unit) == ("delta by memory", "duplicate bucket", 0):
        return ("new",)  # the first bucket begins an update, and begins it again
    num_units = len(units_of(fault.path, *states))
    # Tensors of one request are complete after the last one, and any call of `continue_generation` commits them.
    whole_from = (num_units - 1, True) if fault.path == "tensor by tensor" else (num_units, True)
    may_land = fault.kind in ("kill", "hang") and (fault.unit, fault.within) >= whole_from
    return ("old", "new") if may_land else ("old",)


# -- the tests --------------------------------------------------------------------------------------------------------


def all_faults(states: tuple[State, State], every_kind_between: bool) -> list[Fault]:
    """List every path and kind, at the beginning of every unit and within it, and at the commit. Last of a path: no
    fault.

    every_kind_between: also for units that are neither first nor last. False: a kill, and of the other kinds a third in
    turn, at each of these.
    """
    faults = []
    for path in SENDERS:
        num_units = len(units_of(path, *states))
        kinds = ["kill", "hang", "corrupt", "drop", "wrong shape", "duplicate", "unknown name"]
        for unit in range(num_units):
            here = [Fault(path, kind, unit) for kind in kinds]
            # One request for all tensors is refused as a whole: most of its faults have no middle.
            inner = ("kill", "corrupt") if path == "tensor by tensor" else kinds
            here += [Fault(path, kind, unit, within=True) for kind in inner]
            if path != "disk":
                here.append(Fault(path, "duplicate bucket", unit))
            if not every_kind_between and 0 < unit < num_units - 1:
                here = [f for number, f in enumerate(here) if f.kind == "kill" or (number + unit) % 3 == 0]
            faults += here
        faults += [Fault(path, kind, num_units, within) for kind in ("kill", "hang") for within in (False, True)]
        faults.append(Fault(path, "none"))
    verbs = ("pause_generation", "flush_cache", "begin_weight_update", "verify_weight_update", "end_weight_update")
    faults += [Fault("disk", f"no answer to {verb}") for verb in verbs]
    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "every_kind_between",
    [pytest.param(False, id="each-once"), pytest.param(True, id="all", marks=pytest.mark.exhaustive)],
)
def test_no_fault_of_a_sender_tears_weights_or_outlives_a_deadline(
    tmp_path: Path, record_property: Callable[[str, object], None], every_kind_between: bool
) -> None:
    torch.set_num_threads(1)
    states = two_states()
    faults = all_faults(states, every_kind_between)
    lanes = [faults[lane::NUM_LANES] for lane in range(NUM_LANES)]
    started = time.monotonic()
    processes = [Forked(partial(run_lane, share, tmp_path, states, lane)) for lane, share in enumerate(lanes)]
    try:
        wrong = []
        for process, share in zip(processes, lanes, strict=True):
            if not process.wait(SUITE_S - (time.monotonic() - started)):
                wrong.append("a lane hangs")
            elif process.error is not None:
                wrong.append(process.error)
            elif not process.finished:
                wrong.append(f"an engine died:\n{process.log_tail()}")
            else:
                assert len(process.result) == len(share)  # type: ignore[arg-type]
        assert not wrong, "\n".join(wrong)
    finally:
        for process in processes:
            process.end()
    rows = [row for process in processes for row in process.result]  # type: ignore[attr-defined]
    record_property("figures", f"{table(rows)}\n{time.monotonic() - started:.0f} s")
    assert sum(kind != "none" for _, kind, _ in rows) >= 200


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of the injections by path and kind, and of the weights after them."""
    counts = Counter((path, kind.split(" to ")[0]) for path, kind, _ in rows)
    kinds = list(dict.fromkeys(kind for _, kind in counts))
    lines = [" " * 18 + "".join(f"{kind:>18}" for kind in kinds)]
    for path in dict.fromkeys(path for path, _ in counts):
        lines.append(f"{path:18}" + "".join(f"{counts[path, kind]:18}" for kind in kinds))
    landed = Counter(landed for _, kind, landed in rows if kind != "none")
    lines.append(f"{landed.total()} injections: {landed['old']} left the old weights, {landed['new']} the new ones")
    return "\n".join(lines)


def in_process(state: State) -> tuple[nn.Module, RolloutService]:
    """Make a trainer's model with these weights, and a service around an engine that shares them."""
    model = tiny_model()
    write(model, state)
    config = EngineConfig(kv_cache="16 blocks", max_num_seqs=2, max_num_batched_tokens=32)
    service = RolloutService(Engine(model, config), ServiceConfig(weight_timeout_s=CALL_S))
    service.commit_in_place("0", source=model.named_parameters())
    return model, service


@torch.no_grad()
def write(model: nn.Module, state: State, num_tensors: int | None = None, half: bool = False) -> None:
    """Write an optimizer's step, or only its first tensors, the last of them perhaps only half."""
    pairs = list(model.named_parameters())[:num_tensors]
    for index, (name, parameter) in enumerate(pairs):
        size = parameter.numel() // (2 if half and index == len(pairs) - 1 else 1)
        parameter.view(-1)[:size] = state.weights[name].view(-1)[:size]


def tokens_of(service: RolloutService) -> list[int]:
    with service.rollout():
        params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0)
        (completion,) = service.engine.generate([PROMPT], params)
    return list(completion.token_ids)


def refuses(service: RolloutService) -> bool:
    """Return whether sampling is refused with a reason."""
    try:
        tokens_of(service)
    except SamplingRefused as error:
        return bool(str(error))
    return False


def broken_step(
    model: nn.Module, service: RolloutService, new: State, num_tensors: int, half: bool, kind: type[BaseException]
) -> None:
    with service.optimizer_step():
        write(model, new, num_tensors, half)
        assert refuses(service)
        raise kind("in the step")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit, MemoryError])
def test_no_token_comes_from_weights_that_an_optimizer_step_left_torn(kind: type[BaseException]) -> None:
    torch.set_num_threads(1)
    states = two_states()
    model, service = in_process(states[0])
    num_tensors, current = len(states[0].weights), 0
    for written in range(num_tensors + 1):
        for half in (False, True):
            new = states[1 - current]
            with pytest.raises(kind, match="in the step"):
                broken_step(model, service, new, written, half, kind)
            assert refuses(service)
            with pytest.raises(Poisoned, match="in the step"):
                service.commit_in_place("torn", source=model.named_parameters())
            with pytest.raises(SamplingRefused):
                service.continue_generation()
            with service.optimizer_step():
                write(model, new)
            assert refuses(service), "between a step and its commit"
            service.commit_in_place(f"{written}", source=model.named_parameters())
            current = 1 - current
            assert tokens_of(service) == new.tokens and service.model_digest() == new.digest
    service.close()


@pytest.mark.slow
def test_a_commit_in_place_that_fails_commits_nothing_and_the_next_one_does() -> None:
    torch.set_num_threads(1)
    states = two_states()
    model, service = in_process(states[0])

    def broken_after(num_tensors: int) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(model.named_parameters()):
            if index == num_tensors:
                raise KeyboardInterrupt
            yield pair

    for num_tensors in range(len(states[0].weights)):
        new, before = states[(num_tensors + 1) % 2], service.engine.weight_version
        with service.optimizer_step():
            write(model, new)
        with pytest.raises(KeyboardInterrupt):
            service.commit_in_place("torn", source=broken_after(num_tensors))
        assert refuses(service) and service.engine.weight_version == before
        service.commit_in_place(f"{num_tensors} again", source=model.named_parameters())
        assert tokens_of(service) == new.tokens
    service.close()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "half", "all", "between", "committed"])
def test_a_rank_that_is_killed_around_its_step_gives_no_token_of_torn_weights(moment: str) -> None:
    """Another thread requests tokens all the time; every answer is reported before the next step happens."""
    torch.set_num_threads(1)
    states = two_states()
    reader, writer = os.pipe()

    def rank() -> None:
        model, service = in_process(states[0])
        stepping, asked = threading.Event(), threading.Semaphore(0)

        def ask() -> None:
            while True:
                during = stepping.is_set()
                try:
                    tokens = tokens_of(service)
                except SamplingRefused:
                    tokens = None
                os.write(writer, json.dumps([during and stepping.is_set(), tokens]).encode() + b"\n")
                asked.release()

        threading.Thread(target=ask, daemon=True).start()

        def answers(count: int = 3) -> None:
            while asked.acquire(blocking=False):
                pass  # requests of the moment before
            assert all(asked.acquire(timeout=CALL_S + LATE_S) for _ in range(count))

        def die_if(now: str) -> None:
            answers()
            if moment == now:
                os.kill(os.getpid(), signal.SIGKILL)

        answers()
        with service.optimizer_step():
            stepping.set()
            die_if("before")
            write(model, states[1], len(states[1].weights) // 2, half=True)
            die_if("half")
            write(model, states[1])
            die_if("all")
        die_if("between")
        stepping.clear()
        service.commit_in_place("1", source=model.named_parameters())
        die_if("committed")

    killed = Forked(rank)
    os.close(writer)
    lines: list[str] = []
    with os.fdopen(reader) as told:
        listener = threading.Thread(target=lambda: lines.extend(told), daemon=True)
        listener.start()  # runs all the time: refusals come fast, and a full pipe would delay the answers
        try:
            assert killed.wait(8 * (CALL_S + LATE_S)) and killed.error is None and not killed.finished, killed.error
        finally:
            killed.end()
            listener.join()
    answers = [json.loads(line) for line in lines if line.endswith("\n")]
    given = [tokens for _, tokens in answers if tokens is not None]
    assert given and all(tokens in (states[0].tokens, states[1].tokens) for tokens in given)
    assert all(tokens is None for during, tokens in answers if during)
    assert (given[-1] == states[1].tokens) == (moment == "committed")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["distributed", "shared memory", "disk"])
def test_without_undo_a_killed_sender_leaves_a_refusal_that_a_verified_update_lifts(path: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    states = two_states()
    lane = Forked(partial(_poison_and_heal, path, tmp_path, states))
    try:
        assert lane.wait(12 * (CALL_S + LATE_S)) and lane.error is None and lane.finished, lane.error
    finally:
        lane.end()


def _poison_and_heal(path: str, folder: Path, states: tuple[State, State]) -> None:
    engine = EngineUnderTest(folder, states, 0)
    service = engine.service
    service.begin_weight_update(weight_version="torn", undo="none")
    first = dict(list(states[1].weights.items())[:3])
    service.update_weights_from_named_tensors(list(first.items()))
    service.abort_weight_update("the sender is gone")
    assert service.model_digest() not in [state.digest for state in states]
    assert "poisoned" in service.engine.refusal
    with pytest.raises(SamplingRefused, match="poisoned"):
        engine.generate()
    with pytest.raises(Poisoned):
        service.update_weights_from_named_tensors(list(states[1].weights.items()))
    assert engine.inject(Fault(path, "none"), "1") == "new"
    engine.close()
