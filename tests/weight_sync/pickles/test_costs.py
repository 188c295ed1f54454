"""The work that a payload of a few megabytes can cost: it is bounded, however often the payload names one thing."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.layout.sink import Sink
from lockstep.weight_sync.manifest import Manifest, specs_from_lists
from lockstep.weight_sync.pickles.inert import Budget, Global, UnsafePickle, parse
from lockstep.weight_sync.pickles.payload import read_framework_payload
from lockstep.weight_sync.pickles.payload_tensors import ALLOWED
from lockstep.weight_sync.pickles.shared_storage import NamedStorage
from lockstep.weight_sync.same_host.shared_memory import TensorReceiver

CPU_S = 3.0  # far above the cost of a refusal (0.1 s), far below that of the whole work


class Raw:
    """An object that pickles as a call of any function with any arguments."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.call  # type: ignore[return-value]


@contextmanager
def little_work() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < CPU_S


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[tuple[bytes, bytes]]:
    """The manager and the name of 64 bytes of shared memory."""
    path = Path(f"/dev/shm/torch_{os.getpid()}_{time.monotonic_ns()}_1")
    path.write_bytes(bytes(64 + 64))
    path.chmod(0o600)
    with socket.socket(socket.AF_UNIX) as manager:
        manager.bind(str(tmp_path / "m"))
        yield str(tmp_path / "m").encode(), b"/" + path.name.encode()
    path.unlink()


def tensor(shared: tuple[bytes, bytes], *, size: int = 64, metadata: tuple = (0, (4, 4), (4, 1), False)) -> Raw:
    untyped = Raw(reductions.rebuild_storage_filename, torch.UntypedStorage, *shared, size)
    typed = Raw(reductions.rebuild_typed_storage, untyped, torch.float32)
    return Raw(reductions.rebuild_tensor, Tensor, typed, metadata)


def test_a_shape_of_any_length_is_not_walked_once_for_each_tensor(shared: tuple[bytes, bytes]) -> None:
    long = (1,) * 200_000
    data = pickle.dumps([(f"w{i}", tensor(shared, metadata=(0, long, long, False))) for i in range(400)])
    assert len(data) < 1 << 20
    with little_work(), pytest.raises(ValueError, match="'w0': 200000 dimensions"):
        read_framework_payload(data, None)


def test_a_tensor_that_is_named_often_is_checked_once(
    shared: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, checks, check = tensor(shared), [], NamedStorage.problem
    monkeypatch.setattr(NamedStorage, "problem", lambda self: (checks.append(1), check(self))[1])
    with pytest.raises(TransferFailed, match="attaching"):  # planned, and nobody manages the memory
        read_framework_payload(pickle.dumps([(f"w{i}", one) for i in range(1000)]), None)
    assert len(checks) == 1


def nested_in(name: str, inner: bytes, num_references: int) -> bytes:
    """Pickle references to one LocalSerializedTensor that holds `inner`."""
    module = b"sglang.srt.model_executor.model_runner"
    record = b"c" + module + b"\nLocalSerializedTensor\n)R}\x8c\x06values]B" + len(inner).to_bytes(4, "little") + inner
    values = [record + b"asb\x94"] + [b"h\x00"] * (num_references - 1)  # it is put into the memo, then recalled
    names = [b"\x8c\x08" + f"{name}{index:07}".encode() for index in range(num_references)]
    return b"\x80\x04](" + b"".join(a + b + b"\x86" for a, b in zip(names, values, strict=True)) + b"e."


def test_a_nested_pickle_that_fails_is_charged_each_time() -> None:
    endless = b"\x80\x04" + b"N" * 20_000  # no STOP
    data = nested_in("w", endless, 10)
    with pytest.raises(ValueError) as caught:
        read_framework_payload(data, None, max_bytes=len(data))
    assert str(caught.value).count("the limit is") == 9  # the first one alone was parsed


def test_reading_ends_at_the_twentieth_problem() -> None:
    endless = b"\x80\x04" + b"N" * 40_000
    data = nested_in("w", endless, 5000)
    with little_work(), pytest.raises(ValueError, match=r"'w0000019': .*and 1 more") as caught:
        read_framework_payload(data, None)
    assert "w0000020" not in str(caught.value)


def test_all_nested_pickles_share_one_number_of_opcodes() -> None:
    budget = Budget(9)
    assert parse(b"\x80\x04N.", ALLOWED, budget) is None
    assert parse(b"\x80\x04ctorch\nfloat32\n.", ALLOWED, budget) == Global("torch", "float32")
    assert budget.num_left == 3  # STOP counts too
    with pytest.raises(UnsafePickle, match="in all its parts together"):
        parse(b"\x80\x04" + b"N" * 10 + b".", ALLOWED, budget)


HUGE = 10**4200


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([HUGE] * 7000, "w: shape of 7000 dimensions"),
        ([HUGE] * 2, "w: shape .a number of more than 64 bits, a number of more than 64 bits"),
        ([1 << 62], "w: shape .4611686018427387904"),
        ([1 << 31, 1 << 31], "more elements than there are addresses"),
    ],
)
def test_sizes_that_no_tensor_has_are_refused_before_they_are_multiplied(shape: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specs_from_lists(["w"], ["float32"], [shape])
    lists = {"names": ["w"], "dtypes": ["float32"], "shapes": [shape]}
    manifest = {**lists, "version": None, "digests": {}, "model_digest": None}
    own = {"kind": "shm", "index": 0, "version": None, "manifest": manifest, **lists}
    with little_work(), pytest.raises(ValueError, match="w: shape"):
        TensorReceiver("/dev/shm").receive(own, Sink)  # type: ignore[arg-type]  # refused before the sink is asked


def test_wrong_specs_are_listed_up_to_the_twentieth() -> None:
    with pytest.raises(ValueError, match=r"w19: .*the rest was not read") as caught:
        specs_from_lists([f"w{i}" for i in range(5000)], ["nothing"] * 5000, [[1]] * 5000)
    assert "w20" not in str(caught.value)
    assert Manifest(None, specs_from_lists(["w"], ["float32"], [[0, 1 << 61]])).num_bytes == 0


def test_one_shared_memory_with_two_sizes_is_refused_before_it_is_attached(shared: tuple[bytes, bytes]) -> None:
    two = [("w", tensor(shared, size=32, metadata=(0, (8,), (1,), False))), ("v", tensor(shared))]
    with pytest.raises(ValueError, match="is sent with 32 bytes and with 64"):
        read_framework_payload(pickle.dumps(two), None)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ((1 << 61, (0,), (1,), False), "starts 2305843009213693952 elements into a storage of 64 bytes"),
        ((17, (0,), (1,), False), "starts 17 elements"),
        ((0, (1 << 40,), (0,), False), "its elements overlap: send a copy"),
        ((0, (17,), (0,), False), "68 bytes in a storage of 64"),
    ],
)
def test_absurd_offsets_and_strides_are_refused(
    shared: tuple[bytes, bytes], metadata: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"'w': .*{message}"):
        read_framework_payload(pickle.dumps([("w", tensor(shared, metadata=metadata))]), None)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_socket_behind_which_no_manager_answers_is_not_waited_for(shared, tmp_path, is_full):
    """Torch would wait for it with all threads of this process."""
    path = str(tmp_path / "silent")
    with ExitStack() as opened:
        silent = opened.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(path)
        silent.listen(0)
        while is_full:  # until a connection would be waited for
            other = opened.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            if other.connect_ex(path):
                break
        storage = NamedStorage(path.encode(), shared[1], 64, sent=None)
        assert storage.problem() is None
        with pytest.raises(TransferFailed, match="within 0.05 s" if is_full else "is no torch_shm_manager"):
            storage.attach(0.05)
