"""The same-host hand-over: received bytes, descriptions refused before memory is touched, segments of killed
senders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lockstep
from lockstep.tests.support import prepared_python
from lockstep.weight_sync.errors import SessionError, TransferFailed
from lockstep.weight_sync.manifest import Manifest, TensorSpec, specs_of
from lockstep.weight_sync.same_host.cuda_ipc import CudaHandle, CudaIpcSender, device_index, read_cuda_description
from lockstep.weight_sync.same_host.handover import strided_problem
from lockstep.weight_sync.same_host.segment import Segment, unlink_own_segments
from lockstep.weight_sync.same_host.shared_memory import (
    SharedMemorySender,
    TensorReceiver,
    remove_stale_segments,
)

BUCKET = 4096  # bytes: two halves of 2048


def model(device: str = "cpu") -> list[tuple[str, Tensor]]:
    """Build a model with the same bits in every process."""
    generator = torch.Generator().manual_seed(7)

    def bits(dtype: torch.dtype, *shape: int) -> Tensor:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).reshape(shape).to(device)

    return [
        ("big", bits(torch.bfloat16, 40, 100)),  # spans several buckets
        ("fp8", bits(torch.float8_e4m3fn, 7, 3)),
        ("scalar", torch.tensor(2.5, device=device)),
        ("empty", torch.empty(0, 4, device=device)),
        ("transposed", bits(torch.float32, 6, 11).t()),
        ("every second", bits(torch.int16, 64)[::2]),
        ("mask", torch.tensor([True, False, True], device=device)),
        ("long", bits(torch.int64, 130)),
    ]


def send(kind: str, folder: str, num_updates: str) -> None:
    """Run the sender in a process of its own: updates of the model, one description per line, each followed by a
    reply."""
    torch.set_num_threads(1)
    sender = CudaIpcSender(BUCKET) if kind == "cuda" else SharedMemorySender(BUCKET, folder)
    tensors = model("cuda" if kind == "cuda" else "cpu")
    for update in range(int(num_updates)):
        for description in sender.buckets(tensors, Manifest(f"v{update}", specs_of(tensors))):
            print(json.dumps(description), flush=True)
            assert sys.stdin.readline() == "done\n"
    print("null", flush=True)
    sys.stdin.readline()
    sender.close()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Shelf:
    """A sink over plain tensors, filled with ones; it lends its bytes, or not."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], lends: bool = True) -> None:
        self.tensors = {name: torch.full((t.numel() * t.element_size(),), 1, dtype=torch.uint8) for name, t in named}
        self.specs = {name: TensorSpec.of(name, t) for name, t in named}
        self.lends = lends
        self.expected: list[tuple[TensorSpec, ...]] = []

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        if wrong := [spec.describe() for spec in specs if self.specs.get(spec.name) != spec]:
            raise ValueError(f"not resident: {', '.join(wrong)}")
        self.expected.append(tuple(specs))

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        return self.tensors[name][offset : offset + num_bytes] if self.lends else None

    def write(self, name: str, offset: int, data: Tensor) -> None:
        self.tensors[name][offset : offset + data.numel()].copy_(data)

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        raise AssertionError("no wire of whole bytes writes elements")

    def resident(self, name: str) -> Tensor:
        return self.tensors[name]

    def holds(self, named: Sequence[tuple[str, Tensor]]) -> bool:
        return all(
            torch.equal(self.tensors[name], t.cpu().contiguous().reshape(-1).view(torch.uint8)) for name, t in named
        )

    def untouched(self) -> bool:
        return all(bool((data == 1).all()) for data in self.tensors.values())


class Launched:
    """A sender in a process of its own: this file, run as a program."""

    def __init__(self, kind: str, folder: Path, num_updates: int = 1) -> None:
        root = Path(lockstep.__file__).parent.parent
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        self.process = prepared_python.Popen(
            [sys.executable, __file__, kind, str(folder), str(num_updates)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )

    def description(self) -> dict | None:
        return json.loads(self.process.stdout.readline())  # type: ignore[union-attr]

    def reply(self) -> None:
        self.process.stdin.write("done\n")  # type: ignore[union-attr]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=20)


@pytest.fixture
def launch():
    running = []

    def start(kind: str, folder: Path, num_updates: int = 1) -> Launched:
        running.append(Launched(kind, folder, num_updates))
        return running[-1]

    yield start
    for sender in running:
        sender.end()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "shm"
    path.mkdir()
    return path


def first(folder: Path, tensors=None) -> tuple[SharedMemorySender, object, dict]:
    """Create a sender, its generator, and the first description as a receiver gets it."""
    tensors = tensors or model()
    sender = SharedMemorySender(BUCKET, folder)
    buckets = sender.buckets(tensors, Manifest("v", specs_of(tensors)))
    return sender, buckets, json.loads(json.dumps(next(buckets)))


@pytest.mark.parametrize("lends", [True, False], ids=["landing in place", "through write"])
def test_every_kind_of_tensor_arrives_from_a_separately_launched_sender(folder, launch, lends):
    shelf, receiver, sender = Shelf(model(), lends), TensorReceiver(folder), launch("shm", folder, 2)
    inodes, num_buckets = set(), 0
    while (description := sender.description()) is not None:
        receiver.receive(description, shelf)
        inodes.add(os.stat(description["path"]).st_ino)
        num_buckets += 1
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if description["path"] in line]
        assert len(maps) == 1  # attached once, whatever the number of buckets
        sender.reply()
    assert shelf.holds(model())
    assert len(inodes) == 1  # one segment for two updates
    assert num_buckets >= 10
    assert [specs for specs in shelf.expected if len(specs) == len(model())] == [specs_of(model())] * 2
    sender.reply()
    assert sender.process.wait(timeout=20) == 0
    assert list(folder.iterdir()) == []


def test_a_killed_senders_segment_is_removed_by_the_next_one_and_a_living_senders_stays(folder, launch):
    dead, alive = launch("shm", folder), launch("shm", folder)
    left, used = Path(dead.description()["path"]), Path(alive.description()["path"])
    os.kill(dead.process.pid, signal.SIGKILL)
    dead.process.wait(timeout=20)
    assert left.exists()
    sender = SharedMemorySender(BUCKET, folder)
    assert not left.exists()
    assert used.exists()
    assert remove_stale_segments(folder) == []
    sender.close()


def test_a_forked_child_of_a_killed_sender_does_not_keep_its_segment(folder):
    reading, writing = os.pipe()  # what the child waits for
    child_says, says = os.pipe()
    if (sender := os.fork()) == 0:
        try:
            segment = Segment(folder, BUCKET)
            is_sender = os.fork() != 0
            os.close(writing)
            if not is_sender:  # a worker of a DataLoader, say
                assert remove_stale_segments(folder) == []  # its parent has it
                unlink_own_segments()
                segment.data[0] = 7  # it still sees the memory
                os.write(says, segment.path.name.encode())
            os.read(reading, 1)
        finally:
            os._exit(0)
    for end in (reading, says):
        os.close(end)
    try:
        name = os.read(child_says, 100).decode()
        assert name and (folder / name).exists() and remove_stale_segments(folder) == []
        os.kill(sender, signal.SIGKILL)
        os.waitpid(sender, 0)
        assert remove_stale_segments(folder) == [folder / name]
    finally:
        os.close(writing)  # ends the child
        os.close(child_says)


def test_a_link_among_the_segments_is_not_followed_by_the_sweep(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / "lockstep-1-0123456789abcdef.shm").symlink_to(precious)
    assert remove_stale_segments(folder) == []
    assert precious.read_text() == "mine"


def test_a_description_is_stale_once_its_half_is_packed_again(folder):
    sender, buckets, description = first(folder)
    next(buckets), next(buckets)  # bucket 2 is where bucket 0 was
    shelf = Shelf(model())
    with pytest.raises(TransferFailed, match="before copying, the segment is another bucket's"):
        TensorReceiver(folder).receive(description, shelf)
    assert shelf.untouched()
    buckets.close()
    with pytest.raises(TransferFailed, match="before copying"):
        TensorReceiver(folder).receive(description, shelf)
    sender.close()
    with pytest.raises(TransferFailed, match="is gone"):
        TensorReceiver(folder).receive(description, shelf)


def test_a_sender_that_does_not_wait_for_the_reply_is_caught_after_copying(folder):
    sender, buckets, description = first(folder)

    class Slow(Shelf):
        def destination(self, name, offset, num_bytes):
            next(buckets), next(buckets)
            return super().destination(name, offset, num_bytes)

    with pytest.raises(TransferFailed, match=r"after copying.*tensors big"):
        TensorReceiver(folder).receive(description, Slow(model()))
    sender.close()


def test_a_new_segment_is_attached_when_the_old_one_became_too_small(folder):
    small, large = [("a", torch.arange(8))], [("a", torch.arange(900))]
    sender, receiver = SharedMemorySender(BUCKET, folder), TensorReceiver(folder)
    for tensors in (small, large, small):
        shelf = Shelf(tensors)
        for description in sender.buckets(tensors, Manifest("v", specs_of(tensors))):
            receiver.receive(description, shelf)
        assert shelf.holds(tensors)
    assert len(list(folder.iterdir())) == 1
    sender.close()


def test_a_sender_names_what_does_not_fit_its_manifest_and_can_go_on(folder):
    tensors = model()
    manifest = Manifest("v", specs_of(tensors))
    sender = SharedMemorySender(BUCKET, folder)
    with pytest.raises(ValueError, match="were not given: mask, long"):
        list(sender.buckets(tensors[:-2], manifest))
    with pytest.raises(ValueError, match=r"tensor 1: the manifest has fp8 .*, given was scalar float32\[\]"):
        list(sender.buckets([tensors[0], tensors[2]], manifest))
    with pytest.raises(ValueError, match="not in the manifest: more"):
        list(sender.buckets([*tensors, ("more", torch.ones(1))], manifest))
    running = sender.buckets(tensors, manifest)
    next(running)
    with pytest.raises(SessionError, match="not finished"):
        next(sender.buckets(tensors, manifest))
    running.close()
    assert len(list(sender.buckets(tensors, manifest))) >= 5
    assert list(sender.buckets([], Manifest("v", ()))) == []
    sender.close()


def test_every_offender_of_a_description_is_named_at_once(folder):
    sender, buckets, _ = first(folder)
    description = json.loads(json.dumps(next(bucket for bucket in buckets if len(bucket["names"]) > 3)))
    description["path"] = "/etc/passwd"
    description["pieces"][0][0] += 1  # the tensor's offset, then the bucket's, then the length
    description["pieces"][1][1] = 1 << 40
    description["pieces"][2][2] += 64
    description["sequence"] = 3
    description["half"] = 2
    description["surprise"] = 1
    with pytest.raises(ValueError) as caught:
        TensorReceiver(folder).receive(description, Shelf(model()))
    names = description["names"]
    for part in ("/etc/passwd", "surprise", "sequence 3", "half 2", *(f"{name}: byte" for name in names[:3])):
        assert part in str(caught.value)
    sender.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ["big", "big"]}, "must be as many"),
        ({"dtypes": ["bfloat17"]}, "bfloat17"),
        ({"shapes": [[-1, 5]]}, r"shape \[-1, 5\]"),
        ({"shapes": [[80, 50]]}, "differ from the manifest: big"),
        ({"manifest": {"names": 1}}, "manifest fields of the wrong type"),
        ({"pieces": [[0, 0, True]]}, "three counts"),
        ({"pieces": [[0, 0, -64]]}, "three counts"),
        ({"size": 5}, "size 5"),
        ({"kind": "pickle"}, "kind 'pickle'"),
        ({"path": "../etc/passwd"}, "not a segment"),
        ({"path": None}, "path None"),
        ({"version": 3}, "version 3"),
    ],
)
def test_a_description_that_does_not_hold_touches_no_memory(folder, change, message):
    sender, _, description = first(folder)
    shelf = Shelf(model())
    with pytest.raises(ValueError, match=message):
        TensorReceiver(folder).receive(description | change, shelf)
    assert shelf.untouched() and shelf.expected == []
    sender.close()


def test_files_that_are_no_private_segment_are_refused(folder, tmp_path):
    sender, _, description = first(folder)
    path = Path(description["path"])
    bytes_of_it = path.read_bytes()

    def refused(message: str) -> None:
        shelf = Shelf(model())
        with pytest.raises(ValueError, match=message):
            TensorReceiver(folder).receive(description, shelf)
        assert shelf.untouched()

    path.chmod(0o666)
    refused("others may open it")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(bytes_of_it)
    refused("cannot be opened")
    path.unlink()
    os.mkfifo(path, 0o600)
    refused("not a regular file")
    path.unlink()
    path.write_bytes(bytes_of_it[:-1])
    path.chmod(0o600)
    refused(f"it has {len(bytes_of_it) - 1} bytes")
    path.write_bytes(bytes(len(bytes_of_it)))
    refused("not a segment of a sender")
    sender.close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_field_holds_the_answer_is_an_error_and_no_memory_changes(folder, data):
    sender, _, description = first(folder)
    try:
        key = data.draw(st.sampled_from(sorted(set(description) - {"index", "manifest", "version"})))
        value = data.draw(_JSON)
        if data.draw(st.booleans()) and isinstance(description[key], list):
            value = [value]
        assume(description[key] != value)
        shelf = Shelf(model())
        try:
            TensorReceiver(folder).receive(description | {key: value}, shelf)
        except (ValueError, TransferFailed):
            assert shelf.untouched()
        else:
            assert key in ("size", "pieces")  # other values that fit the segment too
    finally:
        sender.close()


def test_a_wrong_shape_in_a_later_bucket_is_refused_before_that_bucket_is_copied(folder):
    sender, buckets, _ = first(folder)
    description = next(bucket for bucket in buckets if "long" in bucket["names"])
    index = description["names"].index("long")
    description["shapes"][index] = [13, 10]
    shelf = Shelf(model())
    with pytest.raises(ValueError, match=r"long int64\[13, 10\]"):
        TensorReceiver(folder).receive(description, shelf)
    assert shelf.untouched()
    sender.close()


def test_strided_tensors_must_lie_inside_their_storage():
    assert strided_problem((2, 3), (3, 1), 0, 4, 24) is None
    assert strided_problem((2, 3), (3, 1), 1, 4, 24) == "reaches byte 28 of a storage of 24 bytes"
    assert strided_problem((2,), (1 << 61,), 0, 4, 24) is not None
    assert "counts" in (strided_problem((2,), (-1,), 1, 4, 24) or "")
    assert "dimensions" in (strided_problem((2,), (), 0, 4, 24) or "")
    assert strided_problem((0, 3), (3, 1), 0, 4, 0) is None
    assert strided_problem((0, 1 << 40, 1 << 40), (1, 1, 1), 0, 4, 0) is not None


def test_a_device_is_found_by_its_uuid_whatever_the_order():
    trainer, engine = ["aa-1", "bb-2"], ["GPU-BB-2", "GPU-aa-1"]
    assert [device_index(uuid, engine) for uuid in trainer] == [1, 0]
    assert device_index(1, engine) == 1
    for wrong in ("cc-3", 2, -1, True, None, [0]):
        with pytest.raises(ValueError, match="not visible here; visible: GPU-BB-2, GPU-aa-1"):
            device_index(wrong, engine)


def _cuda_description() -> dict:
    spec = TensorSpec("w", torch.bfloat16, (2, 3))
    handle = CudaHandle(spec.dtype, spec.shape, (3, 1), 0, "aa-1", b"h" * 66, 512, 64, b"c", 8, b"e", True)
    assert CudaHandle.from_json(json.loads(json.dumps(handle.to_json())), spec) == handle
    lists = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "handles": [handle.to_json()]}
    return {"kind": "cuda_ipc", "index": 0, "version": "v", "manifest": None, **lists}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": [300, 1]}, "w: reaches byte 606 of a storage of 512"),
        ({"stride": [1]}, "w: shape of 2 dimensions with 1 strides"),
        ({"stride": 3}, "w: stride 3"),
        ({"offset": -1}, "w: shape, stride and offset must be counts"),
        ({"device": "zz"}, "w: device 'zz' is not visible"),
        ({"handle": "%"}, "w: '%' is not base64"),
        ({"handle": None}, "w: no handle for 512 bytes"),
        ({"storage_bytes": "many"}, "w: storage size"),
        ({"more": 1}, "w: a handle has the keys"),
    ],
)
def test_cuda_descriptions_are_checked_before_a_handle_is_opened(change, message):
    description = _cuda_description()
    assert read_cuda_description(description, ["GPU-aa-1"])[0][0][1].handle == b"h" * 66
    description["handles"][0] |= change
    with pytest.raises(ValueError, match=message):
        read_cuda_description(description, ["GPU-aa-1"])


def test_an_empty_storage_is_described_as_torch_does_it() -> None:
    of_storage = ("aa-1", None, 0, 0, False, None, 0, None, None)  # `_share_cuda_` of torch 2.11 on an H100
    arguments = (torch.Tensor, (0, 4), (4, 1), 0, torch.storage.TypedStorage, torch.float32, *of_storage)
    handle = CudaHandle.from_arguments(arguments)
    assert handle.problem(["aa-1"]) is None
    spec = TensorSpec("empty", torch.float32, (0, 4))
    assert CudaHandle.from_json(json.loads(json.dumps(handle.to_json())), spec).problem(["aa-1"]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_arrive_by_handle_from_a_separately_launched_sender(folder, launch):
    shelf, receiver, sender = Shelf(model()), TensorReceiver(folder), launch("cuda", folder, 2)
    while (description := sender.description()) is not None:
        receiver.receive(description, shelf)
        sender.reply()
    assert shelf.holds(model())
    assert CudaIpcSender().bucket_bytes > 0
    sender.reply()
    assert sender.process.wait(timeout=20) == 0


if __name__ == "__main__":
    send(*sys.argv[1:])
