"""Checkpoint folders: files of safetensors and transformers, our own files, and every way in which they can be
broken."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.tests.support import prepared_python
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_leaves, tensor_root
from lockstep.weight_sync.disk import folder as disk
from lockstep.weight_sync.disk import safetensors_file as shard
from lockstep.weight_sync.disk.folder import INDEX_FILE, MANIFEST_FILE, load_folder, read_folder, save_folder
from lockstep.weight_sync.disk.safetensors_file import DTYPE_CODES
from lockstep.weight_sync.errors import TransferFailed
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.manifest import specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction

torch.set_num_threads(1)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Build a tensor of random bit patterns, NaNs and negative zeros included."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype)
    byte_view(tensor).random_(0, 2 if dtype == torch.bool else 256, generator=generator)
    return tensor


def model(seed: int = 0) -> dict[str, Tensor]:
    return {
        "embed.weight": random_tensor(torch.bfloat16, (50, 16), seed),
        "odd": random_tensor(torch.uint8, (7,), seed),  # the tensors after it are not aligned
        "layer.0.weight": random_tensor(torch.float32, (33, 5), seed),
        "layer.1.weight": random_tensor(torch.float8_e4m3fn, (3, 3), seed),
        "scalar": random_tensor(torch.float64, (), seed),
        "empty": random_tensor(torch.float16, (0, 4), seed),
        "last": random_tensor(torch.bool, (5,), seed),
    }


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(byte_view(a[n]), byte_view(b[n])) for n in a)


def resident_like(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], WeightTransaction]:
    resident = {name: random_tensor(t.dtype, tuple(t.shape), 99) for name, t in tensors.items()}
    return resident, WeightTransaction(resident.items())


class RefusingSink:
    """A sink for folders that must be refused before any call of a sink."""

    def expect(self, specs: object) -> None:
        pytest.fail("a broken folder came as far as the sink")


@pytest.mark.parametrize("max_shard_bytes", [1, 200, 1 << 30])
def test_what_is_saved_loads_with_equal_bytes_and_digests(tmp_path, max_shard_bytes):
    tensors = model()
    written = save_folder(tmp_path / "m", tensors.items(), "v1", max_shard_bytes=max_shard_bytes)
    resident, transaction = resident_like(tensors)
    plan = load_folder(tmp_path / "m", transaction)
    transaction.commit()
    assert equal(resident, tensors)
    assert plan.manifest == written and written.version == "v1"
    assert written.model_digest == model_digest(tensors.items())
    name = "layer.0.weight"
    root = tensor_root(name, torch.float32, (33, 5), tensor_leaves(tensors[name]))
    assert written.digests[name] == root.hex()
    assert (tmp_path / "m" / INDEX_FILE).exists() == (max_shard_bytes < 1 << 30)


@pytest.mark.parametrize("max_shard_bytes", [1, 1 << 30])
def test_safetensors_itself_reads_what_we_write(tmp_path, max_shard_bytes):
    tensors = model()
    save_folder(tmp_path / "m", tensors.items(), max_shard_bytes=max_shard_bytes)
    found = {}
    for path in (tmp_path / "m").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert equal(found, tensors)


@pytest.mark.parametrize("code", DTYPE_CODES)
def test_every_dtype_of_safetensors_goes_there_and_back(tmp_path, code):
    dtype = DTYPE_CODES[code]
    tensors = {"a": random_tensor(dtype, (3, 5)), "b": random_tensor(dtype, ())}
    save_file(tensors, tmp_path / "model.safetensors")
    for folder in (tmp_path, tmp_path / "ours"):
        resident, transaction = resident_like(tensors)
        load_folder(folder, transaction)
        assert equal(resident, tensors)
        if folder == tmp_path:
            save_folder(tmp_path / "ours", resident.items())


def test_dtypes_that_safetensors_lacks_are_refused_and_leave_no_folder(tmp_path):
    with pytest.raises(ValueError, match="b: safetensors has no code for complex128"):
        save_folder(tmp_path / "m", [("a", torch.zeros(2)), ("b", torch.zeros(2, dtype=torch.complex128))])
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_the_name_that_safetensors_keeps_for_itself_is_refused_and_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="__metadata__: safetensors keeps this name"):
        save_folder(tmp_path / "m", [("a", torch.zeros(2)), ("__metadata__", torch.zeros(2))])
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_other_writers_is_read_over(tmp_path):
    tensors = {"a": random_tensor(torch.float32, (3, 5))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "steps": "7", "of": 'ü "x"\n'})
    resident, transaction = resident_like(tensors)
    load_folder(tmp_path, transaction)
    assert equal(resident, tensors)


def test_a_transformers_checkpoint_loads(tmp_path, make_model):
    theirs = make_model("qwen3", torch.bfloat16)
    theirs.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    assert (tmp_path / "m" / INDEX_FILE).exists()
    tensors = {name: p.detach() for name, p in theirs.named_parameters()}
    resident, transaction = resident_like(tensors)
    plan = load_folder(tmp_path / "m", transaction)
    assert equal(resident, tensors) and plan.manifest is None


def test_transformers_loads_what_we_write(tmp_path, make_model):
    import transformers

    ours = make_model("qwen3", torch.bfloat16)
    config = ours.config.to_json_string().encode()
    save_folder(tmp_path / "m", ours.named_parameters(), max_shard_bytes=50_000, extra_files={"config.json": config})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    assert equal(dict(theirs.named_parameters()), dict(ours.named_parameters()))


def test_non_contiguous_tensors_are_saved_and_loaded(tmp_path):
    stored = {"w": torch.randn(6, 8).t()}
    save_folder(tmp_path / "m", stored.items())
    resident = {"w": torch.zeros(6, 8).t()}  # the transaction cannot lend it
    transaction = WeightTransaction(resident.items())
    load_folder(tmp_path / "m", transaction)
    assert equal(resident, stored) and resident["w"].stride() == (1, 8)


def test_headers_that_outgrow_their_room_go_to_the_next_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "HEADER_BYTES", 512)
    tensors = {f"layer.{i}": torch.full((2,), float(i)) for i in range(20)}
    tensors["long" + "e" * 2000] = torch.zeros(1)
    save_folder(tmp_path / "m", tensors.items())
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    resident, transaction = resident_like(tensors)
    load_folder(tmp_path / "m", transaction)
    assert equal(resident, tensors)


def test_a_large_tensor_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "READ_BYTES", 256)
    tensors = {"a": random_tensor(torch.bfloat16, (1000,)), "b": random_tensor(torch.float32, (100, 7))}
    save_folder(tmp_path / "m", tensors.items())
    resident, transaction = resident_like(tensors)
    load_folder(tmp_path / "m", transaction)
    assert equal(resident, tensors)


def test_a_path_that_exists_and_names_that_come_twice_are_refused(tmp_path):
    save_folder(tmp_path / "m", [("a", torch.zeros(2))])
    with pytest.raises(ValueError, match="exists already"):
        save_folder(tmp_path / "m", [("a", torch.ones(2))])
    with pytest.raises(ValueError, match="a comes twice"):
        save_folder(tmp_path / "n", [("a", torch.ones(2)), ("a", torch.ones(2))])
    with pytest.raises(ValueError, match="no tensors"):
        save_folder(tmp_path / "n", [])
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_save_that_fails_on_its_way_leaves_nothing(tmp_path):
    def tensors():
        yield "a", torch.zeros(4)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="died"):
        save_folder(tmp_path / "m", tensors())
    assert list(tmp_path.iterdir()) == []


WRITER = """
import os, sys, torch
from lockstep.weight_sync.disk.folder import save_folder
def tensors():
    for i in range(6):
        yield f"w{i}", torch.full((1000,), float(i))
        if i == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
save_folder(sys.argv[1], tensors(), max_shard_bytes=5000)
"""


@pytest.mark.parametrize("killed_at", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 3, 99)), 5])
def test_a_reader_never_sees_the_folder_of_a_killed_writer(tmp_path, killed_at):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "m"), str(killed_at)]
    status = prepared_python.run(command, timeout=60).returncode
    assert status == (0 if killed_at == 99 else -9)
    if killed_at == 99:
        assert len(read_folder(tmp_path / "m").tensors) == 6
    else:
        with pytest.raises(ValueError, match="is not a folder"):
            read_folder(tmp_path / "m")
        save_folder(tmp_path / "m", [("a", torch.zeros(1))])  # and it is not in the way


# --- broken folders


def write_raw(path: Path, header: object, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "no header length": (b"", b"", None, "do not hold a header"),
    "a header longer than the file": ({"a": entry()}, bytes(8), 10_000, "do not hold a header"),
    "a huge header length": ({"a": entry()}, bytes(8), 2**64 - 1, "do not hold a header"),
    "no JSON": (b'{"a": ', bytes(8), None, "is not JSON"),
    "not UTF-8": (b"\xff\xfe", bytes(8), None, "is not JSON"),
    "deep nesting": (b"[" * 100_000, b"", None, "is not JSON"),
    "a list": ([1], bytes(8), None, "not a JSON object"),
    "a key twice": (b'{"a": 1, "a": 2}', bytes(8), None, "more than once: a"),
    "an unknown dtype": ({"a": entry("F7")}, bytes(8), None, "unknown dtype 'F7'"),
    "a dtype that is no string": ({"a": entry([1])}, bytes(8), None, "unknown dtype"),
    "a negative size": ({"a": entry(shape=(-2,))}, bytes(8), None, "must be lists of sizes"),
    "a size that is a bool": ({"a": entry(shape=(True, 2))}, bytes(8), None, "must be lists of sizes"),
    "a shape that is no list": ({"a": entry(shape=2)}, bytes(8), None, "must be lists of sizes"),
    "a size of thousands of digits": (
        b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 4299] * 8) + b'],"data_offsets":[0,8]}}',
        bytes(8),
        None,
        "must be lists of sizes: shape .a number of more than 64 bits, a number",
    ),
    "more elements than there are addresses": (
        {"a": entry(shape=(2**60, 2**60))},
        bytes(8),
        None,
        "more elements than there are addresses",
    ),
    "more dimensions than torch has": ({"a": entry(shape=(1,) * 65)}, bytes(8), None, "shape of 65 dimensions"),
    "an offset of thousands of digits": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 4299 + b"]}}",
        bytes(8),
        None,
        "must be lists of sizes: data_offsets .0, a number of more than 64 bits",
    ),
    "one offset": ({"a": entry(offsets=(8,))}, bytes(8), None, "must be lists of sizes"),
    "offsets of another size": ({"a": entry(offsets=(0, 4))}, bytes(4), None, "8 bytes do not lie between"),
    "an entry with a key more": ({"a": entry() | {"x": 1}}, bytes(8), None, "an entry has"),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), None, "b starts at byte 12 and not at 8"),
    "an overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None, "b starts at byte 4 and not at 8"),
    "a file too short": ({"a": entry()}, bytes(7), None, "holds 7 bytes of tensors and describes 8"),
    "a file too long": ({"a": entry()}, bytes(9), None, "holds 9 bytes of tensors and describes 8"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, bytes(8), None, "not a map of strings"),
}


def test_names_that_come_twice_are_counted_once_and_the_first_are_named(tmp_path):
    """Each of them was counted among all, which took minutes for so many."""
    twice = b"{" + b",".join(b'"%06d":0' % (i // 2) for i in range(200_000)) + b"}"
    write_raw(tmp_path / "model.safetensors", twice, b"")
    with pytest.raises(ValueError, match=r"more than once: 000000, 000001, .*, 000019 and 99980 more$"):
        read_folder(tmp_path)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_before_anything_is_written(tmp_path, what):
    header, data, length, message = BROKEN[what]
    if what == "no header length":
        (tmp_path / "model.safetensors").write_bytes(b"\1\0\0")
    else:
        write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path, RefusingSink())


def test_every_offender_is_listed(tmp_path):
    save_folder(tmp_path / "m", model().items(), max_shard_bytes=1)
    folder = tmp_path / "m"
    (folder / "model-00001-of-00006.safetensors").unlink()
    with open(folder / "model-00003-of-00006.safetensors", "r+b") as file:
        file.truncate(66_000)
    (folder / "model-00005-of-00006.safetensors").write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        read_folder(folder)
    for part in ("00001-of-00006.safetensors: No such file", "00003-of-00006", "00005-of-00006.safetensors: 0 bytes"):
        assert part in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("t") / "m"
    save_file(model(), (folder.parent / "x").as_posix())
    size = (folder.parent / "x").stat().st_size
    folder.mkdir()
    (folder.parent / "x").rename(folder / "model.safetensors")
    os.truncate(folder / "model.safetensors", data.draw(st.integers(0, size - 1)))
    with pytest.raises(ValueError):
        load_folder(folder, RefusingSink())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_reads_as_a_sound_one(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("h")
    path = folder / "model.safetensors"
    save_file(model(), path)
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, 8 + struct.unpack("<Q", raw[:8])[0] - 1))
    raw[position] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[position]))
    path.write_bytes(raw)
    try:
        plan = read_folder(folder)
    except ValueError:
        return
    if {spec.name: spec for spec in plan.specs} == {spec.name: spec for spec in specs_of(model().items())}:
        resident, transaction = resident_like(model())  # a change outside the tensors
        load_folder(plan, transaction)
        assert equal(resident, model())
    else:  # a letter of a name, a dtype of the same size: still every byte is some tensor's
        assert plan.num_bytes == sum(t.nbytes for t in model().values())


@pytest.mark.parametrize("position", ["manifest", "index"])
def test_a_manifest_or_index_that_disagrees_with_the_files_is_refused(tmp_path, position):
    save_folder(tmp_path / "m", model().items(), max_shard_bytes=1)
    if position == "manifest":
        values = json.loads((tmp_path / "m" / MANIFEST_FILE).read_text())
        values["shapes"][0] = [16, 50]
        values["names"][1], values["digests"] = "other", {}
        (tmp_path / "m" / MANIFEST_FILE).write_text(json.dumps(values))
        expected = [
            "embed.weight: the files hold embed.weight bfloat16[50, 16]",
            "other: the files hold nothing",
            "odd: the files hold odd uint8[7], lockstep_manifest.json nothing",
        ]
    else:
        values = json.loads((tmp_path / "m" / INDEX_FILE).read_text())
        values["weight_map"]["ghost"] = values["weight_map"].pop("odd")
        values["weight_map"]["embed.weight"] = values["weight_map"]["ghost"]
        (tmp_path / "m" / INDEX_FILE).write_text(json.dumps(values))
        expected = ["odd is in", "ghost is not in", "embed.weight is not in"]
    with pytest.raises(ValueError) as caught:
        load_folder(tmp_path / "m", RefusingSink())
    assert all(part in str(caught.value) for part in expected)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"names": 5, "digests": 7}', "\udcff"])
def test_a_manifest_of_any_other_kind_is_refused(tmp_path, text):
    save_folder(tmp_path / "m", [("a", torch.zeros(1))])
    (tmp_path / "m" / MANIFEST_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=MANIFEST_FILE):
        read_folder(tmp_path / "m")


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "x.bin", 5, "\0"])
def test_an_index_cannot_name_files_elsewhere(tmp_path, file):
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="cannot be shards"):
        read_folder(folder)


def test_missing_doubled_and_ambiguous_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        read_folder(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "part-00001-of-00003.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "part-00002-of-00003.safetensors")
    with pytest.raises(ValueError) as caught:
        read_folder(tmp_path)
    assert "part-00003-of-00003.safetensors is missing" in str(caught.value)
    assert "a is in part-00001-of-00003.safetensors and in part-00002-of-00003.safetensors" in str(caught.value)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert len(read_folder(tmp_path).tensors) == 1  # as transformers does: the single file is used
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "part-00001-of-00003.safetensors"}}))
    with pytest.raises(ValueError, match="both"):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX_FILE, MANIFEST_FILE])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, name, make):
    if name == MANIFEST_FILE:
        save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}.*is not a regular file"):
        read_folder(tmp_path)


def test_a_tensor_the_model_does_not_have_is_refused_and_nothing_is_written(tmp_path):
    save_folder(tmp_path / "m", [("a", torch.ones(4)), ("b", torch.ones(4)), ("c", torch.ones(4))])
    resident = {"a": torch.zeros(4), "c": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"b: not a tensor.*c: shape"):
        load_folder(tmp_path / "m", WeightTransaction(resident.items()))
    assert not resident["a"].any()


class MeddlingSink:
    """A transaction that changes the folder during its second range."""

    def __init__(self, inner: WeightTransaction, meddle) -> None:
        self.inner, self.meddle, self.num_calls = inner, meddle, 0
        self.expect, self.write = inner.expect, inner.write

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        self.num_calls += 1
        if self.num_calls == 2:
            self.meddle()
        return self.inner.destination(name, offset, num_bytes)


@pytest.mark.parametrize("change", ["append", "truncate", "rewrite", "replace", "delete"])
def test_a_file_that_changes_while_it_is_read_fails_the_load_and_rolls_back(tmp_path, change):
    tensors = {f"w{i}": torch.full((500,), float(i)) for i in range(4)}
    save_folder(tmp_path / "m", tensors.items(), max_shard_bytes=4500)
    path = tmp_path / "m" / "model-00001-of-00002.safetensors"

    def meddle() -> None:
        match change:
            case "append":
                with open(path, "ab") as file:
                    file.write(b"x")
            case "truncate":
                os.truncate(path, path.stat().st_size - 3000)
            case "rewrite":
                with open(path, "r+b") as file:
                    file.seek(-8, os.SEEK_END)
                    file.write(bytes(8))
                os.utime(path, ns=(1, 1))  # two writes within one tick of the file system's clock have the same time
            case "replace":
                (tmp_path / "new").write_bytes(path.read_bytes())
                (tmp_path / "new").rename(path)
            case "delete":
                path.unlink()

    resident = {name: torch.zeros(500) for name in tensors}
    transaction = WeightTransaction(resident.items())
    with pytest.raises(TransferFailed, match="model-00001"):
        load_folder(tmp_path / "m", MeddlingSink(transaction, meddle))
    transaction.rollback()
    assert not any(t.any() for t in resident.values())


def test_a_plan_of_files_that_changed_since_writes_nothing(tmp_path):
    save_folder(tmp_path / "m", [("a", torch.ones(4))])
    plan = read_folder(tmp_path / "m")
    os.utime(tmp_path / "m" / "model.safetensors", ns=(1, 1))
    resident = {"a": torch.zeros(4)}
    with pytest.raises(TransferFailed, match="changed after its header"):
        load_folder(plan, WeightTransaction(resident.items()))
    assert not resident["a"].any()


def test_a_load_past_its_deadline_fails_with_the_tensor_named(tmp_path):
    save_folder(tmp_path / "m", [("a", torch.ones(4))])
    with pytest.raises(TransferFailed, match=r"deadline.*a float32"):
        load_folder(tmp_path / "m", WeightTransaction([("a", torch.zeros(4))]), timeout_s=-1.0)
