"""The frameworks' pickled payload: it is read as SGLang's senders write it, and every other content is refused."""

from __future__ import annotations

import base64
import functools
import importlib
import io
import json
import multiprocessing
import operator
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import types
from collections import OrderedDict
from dataclasses import make_dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

import lockstep
from lockstep.tests.support import prepared_python
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.pickles.inert import MAX_OPCODES, UnsafePickle
from lockstep.weight_sync.pickles.payload import read_framework_payload

ROOT = Path(lockstep.__file__).parent.parent
BUCKET = "sglang.srt.weight_sync.tensor_bucket"
RUNNERS = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
)


def model() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        ("bytes", torch.randint(0, 256, (5,), dtype=torch.uint8, generator=generator)),  # the rest is not aligned
        ("half", torch.randn(3, 4, generator=generator).bfloat16()),
        ("fp8", torch.randn(7, generator=generator).to(torch.float8_e4m3fn)),
        ("single", torch.randn(2, 3, generator=generator)),
        ("scalar", torch.tensor(1.5, dtype=torch.float64)),
        ("empty", torch.empty(0, 3)),
        ("mask", torch.tensor([True, False])),
    ]


def same(read: list[tuple[str, Tensor]], wanted: list[tuple[str, Tensor]]) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return [name for name, _ in read] == [name for name, _ in wanted] and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for (_, a), (_, b) in zip(read, wanted, strict=True)
    )


# The sender: this file, run as a program. Only there modules named sglang exist.


def register_stand_ins() -> dict[str, type]:
    """Register classes under SGLang's names, with its fields."""
    classes = {
        f"{BUCKET}.FlattenedTensorMetadata": ("name", "shape", "dtype", "start_idx", "end_idx", "numel"),
        f"{BUCKET}.FlattenedTensorBucket": ("flattened_tensor", "metadata"),
        **{f"{module}.LocalSerializedTensor": ("values",) for module in RUNNERS},
    }
    made = {}
    for path, fields in classes.items():
        module, name = path.rsplit(".", 1)
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        made[path] = make_dataclass(name, fields)
        made[path].__module__ = module
        setattr(sys.modules[module], name, made[path])
    return made


def serialize(value: object) -> bytes:
    """Serialize as SGLang's MultiprocessingSerializer."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def flatten(made: dict[str, type], tensors: list[tuple[str, Tensor]]) -> tuple[Tensor, list[object]]:
    parts, metadata, end = [], [], 0
    for name, tensor in tensors:
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
        start, end = end, end + parts[-1].numel()
        fields = (name, tensor.shape, tensor.dtype, start, end, end - start)
        metadata.append(made[f"{BUCKET}.FlattenedTensorMetadata"](*fields))
    return torch.cat(parts), metadata


def send() -> None:
    torch.set_num_threads(1)
    multiprocessing.current_process().authkey = b"shared by a parent and its children"
    made = register_stand_ins()
    tensors = model()
    base = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    views = [("rows", base[1:3]), ("transposed", base.t()), ("whole", base), ("parameter", torch.nn.Parameter(base))]
    payloads: dict[str, object] = {}
    keep: list[object] = []
    for strategy in ("file_system", "file_descriptor"):
        torch.multiprocessing.set_sharing_strategy(strategy)
        flat, metadata = flatten(made, tensors)
        bucket = made[f"{BUCKET}.FlattenedTensorBucket"](flat, metadata)
        nothing = {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
        keep += [flat, nothing, tensors, base]
        kinds: dict[str, object] = {
            "named": tensors,
            "views": views,
            "dict": {"flattened_tensor": flat, "metadata": metadata},
            "bucket": bucket,
            "nothing": nothing,
        }
        for index, module in enumerate(RUNNERS):
            local = made[f"{module}.LocalSerializedTensor"]
            kinds[f"per rank {index}"] = [(n, local([serialize(torch.zeros(1)), serialize(t)])) for n, t in tensors]
        payloads |= {f"{strategy} {k}": base64.b64encode(serialize(v)).decode() for k, v in kinds.items()}
    print(json.dumps(payloads), flush=True)
    # The output of our own writer must be readable by pickle itself, as in a stock engine.
    for line in sys.stdin:
        read = pickle.loads(base64.b64decode(json.loads(line)))
        fields = [(m.name, list(m.shape), str(m.dtype), m.start_idx, m.end_idx, m.numel) for m in read["metadata"]]
        print(json.dumps([read["flattened_tensor"].tolist(), fields]), flush=True)


def run_file(*arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return prepared_python.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment,
    )


@pytest.fixture(scope="module")
def sender():
    """Start the sender's process; returns it with its payloads by strategy and kind."""
    process = run_file("send")
    payloads = json.loads(process.stdout.readline())  # type: ignore[union-attr]
    yield process, payloads
    process.kill()
    process.communicate(timeout=20)


@pytest.fixture
def authkey():
    before = multiprocessing.current_process().authkey
    multiprocessing.current_process().authkey = b"shared by a parent and its children"
    yield
    multiprocessing.current_process().authkey = before


STRATEGIES = ("file_system", "file_descriptor")


@pytest.mark.usefixtures("authkey")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_named_tensors_arrive_as_the_frameworks_send_them(sender, strategy):
    assert same(read_framework_payload(sender[1][f"{strategy} named"], None), model())
    base = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    views = [("rows", base[1:3]), ("transposed", base.t()), ("whole", base), ("parameter", base)]
    assert same(read_framework_payload(sender[1][f"{strategy} views"], "direct"), views)
    assert not any(name.split(".")[0] == "sglang" for name in sys.modules)


@pytest.mark.usefixtures("authkey")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flattened_buckets_arrive_although_nothing_in_them_is_aligned(sender, strategy):
    assert same(read_framework_payload(sender[1][f"{strategy} dict"], "flattened_bucket"), model())
    if strategy == "file_system":
        raw = base64.b64decode(sender[1]["file_system bucket"])
        assert same(read_framework_payload(raw, "flattened_bucket"), model())
    assert read_framework_payload(sender[1][f"{strategy} nothing"], "flattened_bucket") == []


@pytest.mark.usefixtures("authkey")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_unpickles_its_own_tensors(sender, strategy):
    for index in range(len(RUNNERS)):
        assert same(read_framework_payload(sender[1][f"{strategy} per rank {index}"], None, tp_rank=1), model())
    with pytest.raises(ValueError, match=r"bytes.*no value for tensor-parallel rank 2.*mask.*rank 2"):
        read_framework_payload(sender[1]["file_system per rank 0"], None, tp_rank=2)


def test_descriptors_of_a_stranger_are_refused_with_the_remedy(sender):
    with pytest.raises(TransferFailed, match="set_sharing_strategy"):
        read_framework_payload(sender[1]["file_descriptor bucket"], "flattened_bucket", timeout_s=5)


@pytest.mark.usefixtures("authkey")
def test_a_sender_that_hands_out_no_descriptor_is_not_waited_for_beyond_the_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        storage = Raw(reductions.rebuild_typed_storage, Raw(*fd_storage(str(tmp_path / "s"))), torch.float32)
        data = serialize([("w", Raw(reductions.rebuild_tensor, Tensor, storage, (0, (2,), (1,), False)))])
        started = time.monotonic()
        with pytest.raises(TransferFailed, match=r"within 0.3 s"):
            read_framework_payload(data, None, timeout_s=0.3)
        assert time.monotonic() - started < 5


def test_what_our_writer_makes_is_read_by_us_and_by_plain_pickle(sender):
    process, _ = sender
    assert same(read_framework_payload(serialize_for_engine(model()), None), model())
    assert same(read_framework_payload(serialize_for_engine(model(), "flattened_bucket"), "flattened_bucket"), model())
    assert read_framework_payload(serialize_for_engine([], "flattened_bucket"), "flattened_bucket") == []
    process.stdin.write(json.dumps(serialize_for_engine(model(), "flattened_bucket")) + "\n")
    flat, fields = json.loads(process.stdout.readline())
    assert flat == [b for _, t in model() for b in t.contiguous().flatten().view(torch.uint8).tolist()]
    assert [(f[0], f[1], f[2]) for f in fields] == [(n, list(t.shape), str(t.dtype)) for n, t in model()]
    assert all(start + length == end for *_, start, end, length in fields)
    with pytest.raises(ValueError, match="more than once: bytes"):
        serialize_for_engine([*model(), model()[0]])
    with pytest.raises(ValueError, match="load_format 'delta'"):
        serialize_for_engine(model(), "delta")  # type: ignore[arg-type]


def test_shared_memory_is_freed_once_it_was_read():
    def ours() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}

    before = ours()
    text = serialize_for_engine(model(), "flattened_bucket")
    assert len(ours() - before) == 1
    read = read_framework_payload(text, "flattened_bucket")
    assert same(read, model())
    del read
    assert ours() == before


def test_views_are_the_senders_memory_where_they_are_aligned():
    tensors = [("a", torch.arange(4.0)), ("b", torch.arange(6.0))]
    read = read_framework_payload(serialize_for_engine(tensors, "flattened_bucket"), "flattened_bucket")
    assert read[0][1].untyped_storage().data_ptr() == read[1][1].untyped_storage().data_ptr()


# Attacks. Each would run a command under plain pickle, or tries to bypass a table of names.


class Raw:
    """An object that pickles as a call of any function with any arguments."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call  # type: ignore[return-value]


def fd_storage(address: str) -> tuple:
    duplicate = object.__new__(importlib.import_module("multiprocessing.resource_sharer").DupFd)
    duplicate._id = (address, 1)
    return reductions.rebuild_storage_fd, torch.UntypedStorage, duplicate, 8


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def attacks(marker: str) -> dict[str, bytes]:
    """Build payloads that create the marker under plain pickle."""
    command = f"touch {marker}"
    source = f"__import__('os').system({command!r})"
    run = _text(command) + b"\x85R."
    posix = importlib.import_module("posix")
    torch_file = io.BytesIO()
    torch.save({"x": Raw(os.system, command)}, torch_file)
    # The names are stored from a list, then recalled from the memo.
    memoized = b"\x80\x04]" + _text("os") + b"\x94a" + _text("system") + b"\x94a" + b"h\x00h\x01\x93" + run[:-1] + b"a."
    imported = b"cbuiltins\n__import__\n(" + _text("os") + b"tR"
    getattr_chain = b"\x80\x04cbuiltins\ngetattr\n(" + imported + _text("system") + b"tR" + run
    chains = {
        "os.system": Raw(os.system, command),
        "posix.system": Raw(posix.system, command),
        "subprocess": Raw(subprocess.getoutput, command),
        "eval": Raw(eval, source),
        "exec": Raw(exec, source),
        "operator.methodcaller": Raw(operator.methodcaller("system", command), Raw(__import__, "os")),
        "functools.partial": Raw(functools.partial(os.system, command)),
        "map": Raw(list, Raw(map, eval, [source])),
        "nested torch.load": Raw(torch.storage._load_from_bytes, torch_file.getvalue()),
        "inside a named tensor": [("w", Raw(os.system, command))],
        "inside a bucket": {"flattened_tensor": Raw(os.system, command), "metadata": []},
        "as a storage": [
            ("w", Raw(reductions.rebuild_tensor, Tensor, Raw(os.system, command), (0, (1,), (1,), False)))
        ],
        "as an ordered dict": OrderedDict(w=Raw(os.system, command)),
    }
    made = {name: pickle.dumps(value) for name, value in chains.items()}
    return made | {
        "global opcode": b"cos\nsystem\n(" + b"S'" + command.encode() + b"'\ntR.",
        "inst opcode": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "obj opcode": b"(cos\nsystem\n" + b"S'" + command.encode() + b"'\no.",
        "memoized stack global": memoized,
        "getattr": getattr_chain,
        "dotted attribute": b"\x80\x04" + _text("os") + _text("path.os.system") + b"\x93" + run,
        "dotted through an allowed module": b"\x80\x04"
        + _text("torch.multiprocessing.reductions")
        + _text("os.system")
        + b"\x93"
        + run,
        "dotted through an allowed name": b"\x80\x04"
        + _text("torch.storage")
        + _text("UntypedStorage.__init__.__globals__.__class__")
        + b"\x93)R0"
        + _text("os")
        + _text("system")
        + b"\x93"
        + run,
    }


def more_refusals() -> dict[str, tuple[bytes, str]]:
    """Build payloads that plain pickle would accept in part, with the expected refusals."""

    def named(module: str, name: str) -> bytes:
        return b"\x80\x04" + _text(module) + _text(name) + b"\x93."

    blocked = {
        f"{module}.{name}": (named(module, name), f"blocked unsafe global {module}.{name}")
        for module, name in (
            ("builtins", "getattr"),
            ("builtins", "eval"),
            ("copyreg", "_reconstructor"),
            ("operator", "attrgetter"),
            ("functools", "partial"),
            ("torch", "load"),
            ("torch", "Tensor.apply_"),
            ("torch.storage", "_load_from_bytes"),
            ("torch._utils", "_rebuild_wrapper_subclass"),
            ("torch._utils", "_get_obj_from_type"),
            ("torch.multiprocessing.reductions", "rebuild_event"),
            ("sglang.srt.utils.common", "dynamic_import"),
            ("multiprocessing.connection", "Client"),
            ("", ""),
            ("torch multiprocessing", "x"),
        )
    }
    size = b"\x80\x04ctorch\nSize\n"
    doubling = b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(100))  # (t, t) of (t, t) of ...
    return blocked | {
        "persistent id": (b"\x80\x04Pos.system\n.", "blocked pickle opcode PERSID"),
        "persistent id from the stack": (b"\x80\x04" + _text("x") + b"Q.", "blocked pickle opcode BINPERSID"),
        "extension registry": (b"\x80\x04\x82\x01.", "blocked pickle opcode EXT1"),
        "keywords": (size + b")}\x92.", "blocked pickle opcode NEWOBJ_EX"),
        "sets": (b"\x80\x04\x8f.", "blocked pickle opcode EMPTY_SET"),
        "state of a class": (size + b"}" + _text("__new__") + b"Nsb.", "a state for something"),
        "state twice": (size + b")R}b}b.", "a state for something"),
        "call of a string": (b"\x80\x04" + _text("os.system") + b")R.", "a call of something"),
        "call of a call": (size + b")R)R.", "a call of something"),
        "keys that hash forever": (b"\x80\x04})\x94" + doubling + b"Ns.", "a dict with string keys"),
        "items of a class": (size + b"Na.", "not a list"),
        "a huge memo": (b"\x80\x04Nr\xff\xff\xff\xff.", "a list of (name, tensor)"),
        "unknown memo": (b"\x80\x04h\x05.", "recalls 5"),
        "huge length": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.", "expected"),
        "too many": (b"\x80\x04](" + b"]" * MAX_OPCODES + b"e.", "opcodes"),
        "underflow": (b"\x80\x04R.", "takes more than"),
        "no end": (b"\x80\x04N", "exhausted"),
        "a tail": (b"\x80\x04N.N.", "after the end"),
        "rubbish": (b"\xff\xfe\xfd", "opcode"),
        "empty": (b"", "exhausted"),
        "call cycles": (b"\x80\x04]\x94h\x00a.", "entry 0"),
    }


@pytest.mark.parametrize("name", list(attacks("")))
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_an_attack_is_refused_by_name_and_runs_nothing(tmp_path, name, load_format):
    marker = tmp_path / "was here"
    data = attacks(str(marker).replace(" ", "_"))[name]
    with pytest.raises(UnsafePickle, match=r"blocked (unsafe global|pickle opcode) \w+"):
        read_framework_payload(data, load_format)
    with pytest.raises(UnsafePickle, match="blocked"):
        read_framework_payload(base64.b64encode(data).decode(), load_format)
    assert list(tmp_path.iterdir()) == []


def test_the_attacks_are_live_under_plain_pickle(tmp_path):
    process = run_file("attack", str(tmp_path))
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(len(attacks(""))))


@pytest.mark.parametrize("name", list(more_refusals()))
def test_what_no_tensor_payload_needs_is_refused(name):
    data, message = more_refusals()[name]
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        read_framework_payload(data, None)
    assert message in str(caught.value)
    assert time.monotonic() - started < 200  # of a payload that would take hours


def test_an_attack_in_the_second_layer_is_refused(tmp_path):
    marker = tmp_path / "marker"
    inner = pickle.dumps(Raw(os.system, f"touch {marker}"))
    made = register_stand_ins()
    try:
        for module in RUNNERS:
            data = pickle.dumps([("w", made[f"{module}.LocalSerializedTensor"]([inner]))])
            with pytest.raises(UnsafePickle, match=r"blocked unsafe global posix\.system"):
                read_framework_payload(data, None)
            nested = made[f"{module}.LocalSerializedTensor"]([data])
            twice = pickle.dumps([("w", made[f"{module}.LocalSerializedTensor"]([pickle.dumps(nested)]))])
            with pytest.raises(ValueError, match=r"a tensor was expected, not .*LocalSerializedTensor"):
                read_framework_payload(twice, None)
            often = pickle.dumps([(f"w{i}", nested) for i in range(50)])
            with pytest.raises(ValueError, match="the limit is"):
                read_framework_payload(often, None, max_bytes=len(often))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
    assert not marker.exists()


# Wrong arguments. The storage is real; its description is not.


@pytest.fixture
def storage(tmp_path):
    """Build the arguments of a storage of 64 bytes in shared memory, and the socket that belongs to it."""
    path = Path(f"/dev/shm/torch_{os.getpid()}_{time.monotonic_ns()}_1")
    path.write_bytes(bytes(64 + 64))
    path.chmod(0o600)
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(tmp_path / "m"))
        yield {"manager": str(tmp_path / "m").encode(), "handle": b"/" + path.name.encode(), "size": 64}
    path.unlink()


def tensor_payload(
    storage: dict, metadata: object = (0, (4, 4), (4, 1), False), dtype: object = torch.float32
) -> bytes:
    untyped = Raw(
        reductions.rebuild_storage_filename,
        torch.UntypedStorage,
        storage["manager"],
        storage["handle"],
        storage["size"],
    )
    typed = Raw(reductions.rebuild_typed_storage, untyped, dtype)
    return pickle.dumps([("w", Raw(reductions.rebuild_tensor, Tensor, typed, metadata))])


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({}, (0, (4, 5), (5, 1), False), "reaches byte 80 of a storage of 64"),
        ({}, (1, (4, 4), (4, 1), False), "reaches byte 68"),
        ({}, (0, (2,), (1 << 61,), False), "reaches byte"),
        ({}, (0, (4,), (-4,), False), "sizes or strides"),
        ({}, (-1, (1,), (1,), False), "must be counts"),
        ({}, (True, (1,), (1,), False), "must be counts"),
        ({}, (0, (4,), (4, 1), False), "1 dimensions with 2 strides"),
        ({}, (0, "44", (4, 1), False), "sizes or strides"),
        ({}, (0, (4,)), "metadata"),
        ({"size": 1 << 40}, (0, (4,), (1,), False), "less than the storage's"),
        ({"size": -1}, (0, (4,), (1,), False), "storage size -1"),
        ({"handle": b"/../../etc/passwd"}, (0, (4,), (1,), False), "not one of torch's"),
        ({"handle": b"/torch_1_2_3/../x"}, (0, (4,), (1,), False), "not one of torch's"),
        ({"handle": b"/torch_0_0_0"}, (0, (4,), (1,), False), "No such file"),
        ({"handle": "text"}, (0, (4,), (1,), False), "not one of torch's"),
        ({"manager": b"/etc/passwd"}, (0, (4,), (1,), False), "not a socket"),
        ({"manager": b"a\0b"}, (0, (4,), (1,), False), "socket"),
        ({"manager": 3}, (0, (4,), (1,), False), "manager 3"),
    ],
)
def test_a_tensor_outside_its_storage_is_never_attached(storage, change, metadata, message):
    with pytest.raises(ValueError, match=f"'w': .*{message}"):
        read_framework_payload(tensor_payload(storage | change, metadata), None)


def test_every_offender_among_named_tensors_is_listed(storage):
    def typed(size: int = 64) -> Raw:
        name = reductions.rebuild_storage_filename
        untyped = Raw(name, torch.UntypedStorage, storage["manager"], storage["handle"], size)
        return Raw(reductions.rebuild_typed_storage, untyped, torch.float32)

    def tensor(shape: tuple[int, ...], stride: tuple[int, ...]) -> Raw:
        return Raw(reductions.rebuild_tensor, Tensor, typed(), (0, shape, stride, False))

    entries = [("one", tensor((17,), (1,))), ("two", 3), ("two", None), ("three",), (4, tensor((1,), (1,)))]
    entries += [("five", Raw(reductions.rebuild_storage_empty, torch.UntypedStorage)), ("six", torch.float32)]
    with pytest.raises(ValueError) as caught:
        read_framework_payload(pickle.dumps(entries), None)
    for part in (
        "'one': reaches byte 68",
        "'two': a tensor was expected, not 3",
        "entry 3",
        "entry 4",
        "'five'",
        "'six'",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="'w': a dtype was expected"):
        read_framework_payload(tensor_payload(storage, dtype=Tensor), None)


def _cuda(**changes: object) -> Raw:
    values = {
        "shape": (2,),
        "stride": (1,),
        "offset": 0,
        "dtype": torch.float32,
        "device": "GPU-0",
        "handle": b"h" * 64,
    }
    values |= changes
    v = values
    handles = (v["handle"], 64, 0, False, b"c", 0, b"e", True)
    return Raw(
        reductions.rebuild_cuda_tensor,
        *(
            Tensor,
            torch.Size(v["shape"]),
            v["stride"],
            v["offset"],
            torch.storage.TypedStorage,
            v["dtype"],
            v["device"],
        ),
        *handles,
    )


def test_cuda_handles_of_devices_that_are_not_here_are_refused_before_they_are_opened():
    with pytest.raises(ValueError, match="'w': device 'GPU-0' is not visible here"):
        read_framework_payload(pickle.dumps([("w", _cuda())]), None)
    with pytest.raises(ValueError, match="'w': handle"):
        read_framework_payload(pickle.dumps([("w", _cuda(handle=b"h" * 99999))]), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_idx": 8}, "in 56 bytes"),
        ({"end_idx": 65}, "bytes 0 to 65 of a bucket of 64"),
        ({"start_idx": -1}, "bytes -1"),
        ({"end_idx": 1 << 70}, "bytes 0 to a value of type int"),
        ({"numel": 16}, "numel 16"),
        ({"shape": (4, 5)}, r"\[4, 5\] in 64 bytes"),
        ({"shape": (-4, -4)}, "sizes or strides"),
        ({"dtype": "float32"}, "a dtype was expected, not 'float32'"),
        ({"dtype": torch.Tensor}, "a dtype was expected, not torch.Tensor"),
        ({"name": 3}, "name 3"),
    ],
)
def test_a_buckets_metadata_must_lie_in_the_bucket(storage, change, message):
    made = register_stand_ins()
    try:
        kind = made[f"{BUCKET}.FlattenedTensorMetadata"]
        fields = {"name": "w", "shape": (4, 4), "dtype": torch.float32, "start_idx": 0, "end_idx": 64, "numel": 64}
        name = reductions.rebuild_storage_filename
        untyped = Raw(name, torch.UntypedStorage, storage["manager"], storage["handle"], 64)
        typed = Raw(reductions.rebuild_typed_storage, untyped, torch.uint8)
        flat = Raw(reductions.rebuild_tensor, Tensor, typed, (0, (64,), (1,), False))
        bad, twin = kind(**fields | change), kind(**fields)
        data = pickle.dumps({"flattened_tensor": flat, "metadata": [bad, twin, twin, 5]})
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == "sglang"]:
            del sys.modules[module]
    with pytest.raises(ValueError, match=f"metadata 0: .*{message}.*metadata 2: 'w' is named more.*metadata 3:"):
        read_framework_payload(data, "flattened_bucket")


def test_sizes_forms_and_the_switch(storage):
    data = tensor_payload(storage)
    with pytest.raises(ValueError, match="the limit is 100"):
        read_framework_payload(data, None, max_bytes=100)
    with pytest.raises(ValueError, match="the limit is 100"):
        read_framework_payload(base64.b64encode(data).decode(), None, max_bytes=100)
    with pytest.raises(UnsafePickle, match=r"turned off \(allow_pickle=False\)"):
        read_framework_payload(serialize_for_engine([]), None, allow=False)
    with pytest.raises(ValueError, match=r"load_format 'my\.loader'"):
        read_framework_payload(data, "my.loader")
    with pytest.raises(ValueError, match="not base64"):
        read_framework_payload("%%%%", None)
    with pytest.raises(ValueError, match="base64 text or bytes, not a value of type list"):
        read_framework_payload([data], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a dict of flattened_tensor and metadata"):
        read_framework_payload(data, "flattened_bucket")
    with pytest.raises(ValueError, match=r"a list of \(name, tensor\)"):
        read_framework_payload(pickle.dumps({"w": 1}), None)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send()
    else:
        for index, name in enumerate(attacks("")):
            try:
                pickle.loads(attacks(f"{sys.argv[2]}/{index}")[name])
            except (TypeError, AttributeError, pickle.UnpicklingError) as error:
                print(name, error)
