"""Pulls of versioned folders: the full checkpoint of a version appears whole, from any chain, or not at all."""

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.weight_sync.delta import pull
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.pull import PULL_FILE, pull_weights, version_folder
from lockstep.weight_sync.delta.stream import DATA_FILE, save_delta
from lockstep.weight_sync.digests.model_digest import model_digest, model_root, tensor_leaves, tensor_root
from lockstep.weight_sync.disk.folder import MANIFEST_FILE, load_folder, read_folder, save_folder
from lockstep.weight_sync.errors import DigestMismatch, TransferFailed
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction

torch.set_num_threads(1)

Tensors = dict[str, Tensor]
CHAIN = {1: None, 2: 1, 3: 2, 5: 3, 6: 2, 9: None, 10: 9}  # version: base of its delta


def states() -> dict[int, Tensors]:
    """Make a model with a tensor that is not aligned in its file, and a new state of it for each version."""
    generator = torch.Generator().manual_seed(0)
    first = {
        "odd": torch.randint(0, 256, (7,), dtype=torch.uint8, generator=generator),
        "a": torch.randn(40, 30, generator=generator).bfloat16(),
        "b": torch.randn(500, generator=generator),
        "frozen": torch.randn(100, generator=generator).half(),
    }
    found = {}
    for version in CHAIN:
        rows = torch.rand(40, 30, generator=generator) < 0.05
        new = {name: tensor.clone() for name, tensor in (first if not found else found[max(found)]).items()}
        new["a"].view(torch.int16)[rows] ^= 3
        new["b"][version] += 1
        found[version] = new
    return found


STATES = states()


def result(version: int) -> Manifest:
    tensors = STATES[version]
    roots = {n: tensor_root(n, t.dtype, t.shape, tensor_leaves(t)) for n, t in tensors.items()}
    digests = {n: r.hex() for n, r in roots.items()}
    return Manifest(str(version), specs_of(tensors.items()), digests, model_root(roots.items()))


def publish(source: Path, version: int, with_digests: bool = True) -> None:
    base = CHAIN[version]
    if base is None:
        extra = {"config.json": b'{"first": true}', "tokenizer.json": b"{}"}
        save_folder(
            version_folder(source, version),
            STATES[version].items(),
            str(version),
            max_shard_bytes=3000,
            extra_files=extra,
        )
        return
    chunks = encode_delta(STATES[base], STATES[version].items(), chunk_bytes=512)
    manifest = result(version) if with_digests else None
    save_delta(version_folder(source, version), str(base), str(version), chunks, result=manifest)


@pytest.fixture
def source(tmp_path) -> Path:
    for version in CHAIN:
        publish(tmp_path / "shared", version)
    return tmp_path / "shared"


def loaded(folder: Path) -> Tensors:
    resident = {name: torch.zeros_like(tensor) for name, tensor in STATES[1].items()}
    load_folder(folder, WeightTransaction(resident.items()))
    return resident


def holds(folder: Path, version: int) -> bool:
    if read_folder(folder).manifest != result(version):
        return False
    tensors = loaded(folder)
    return all(torch.equal(byte_view(tensors[n]), byte_view(t)) for n, t in STATES[version].items())


def no_leftovers(local: Path) -> bool:
    return sorted(path.name for path in local.parent.iterdir() if path.name != "shared") == [".local.lock", "local"]


@pytest.mark.parametrize("version", CHAIN)
def test_any_version_is_assembled_from_nothing(tmp_path, source, version):
    local = tmp_path / "local"
    record = pull_weights(local, source, version)
    assert holds(local, version) and no_leftovers(local)
    assert record.version == version and record.folder == local and record.verified and not record.is_local_base
    assert record.base_version == (9 if version > 6 else 1)
    assert record.deltas == {1: (), 2: (2,), 3: (2, 3), 5: (2, 3, 5), 6: (2, 6), 9: (), 10: (10,)}[version]
    assert (local / "config.json").read_bytes() == b'{"first": true}'
    assert read_folder(local).manifest.model_digest == model_digest(STATES[version].items())


def written(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The files and when each was written; not when it was read, which a file system may also keep."""
    return {path.name: (s.st_ino, s.st_size, s.st_mtime_ns) for path in folder.iterdir() for s in [path.stat()]}


def test_what_is_there_already_needs_no_work_and_no_source_folder(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 3)
    before = written(local)
    shutil.rmtree(version_folder(source, 1))
    again = pull_weights(local, source, 3)
    assert (again.base_version, again.deltas, again.bytes_read, again.verified) == (None, (), 0, True)
    shutil.rmtree(version_folder(source, 3))
    pull_weights(local, source, 3)
    assert written(local) == before


def test_the_local_folder_is_the_base_where_the_chain_passes_through_it(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 2)
    shutil.rmtree(version_folder(source, 1))  # the older ones may be removed then
    shutil.rmtree(version_folder(source, 2))
    record = pull_weights(local, source, 5)
    assert holds(local, 5) and record.is_local_base and record.base_version == 2 and record.deltas == (3, 5)
    record = pull_weights(local, source, 10)
    assert holds(local, 10) and not record.is_local_base
    with pytest.raises(ValueError, match=r"version 2 is missing \(6 needs 2\).*the local folder holds 10"):
        pull_weights(local, source, 6)
    assert holds(local, 10) and no_leftovers(local)


def test_a_damaged_local_base_is_noticed_and_the_source_used(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 2)
    shard = next(path for path in local.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)
    record = pull_weights(local, source, 3)
    assert holds(local, 3) and not record.is_local_base


@pytest.mark.parametrize("change", [lambda t: t.float(), lambda t: t[:3]], ids=["dtypes", "shapes"])
def test_a_local_base_of_another_run_is_noticed_by_its_tensors_and_the_source_used(tmp_path, source, change):
    local, elsewhere = tmp_path / "local", tmp_path / "elsewhere"
    save_folder(version_folder(elsewhere, 2), [(name, change(t)) for name, t in STATES[2].items()], "2")
    pull_weights(local, elsewhere, 2)
    record = pull_weights(local, source, 3)
    assert holds(local, 3) and not record.is_local_base


def test_a_damaged_source_is_refused_and_the_local_folder_stays(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 2)
    for file in (version_folder(source, 9) / "model-00001-of-00002.safetensors", version_folder(source, 5) / DATA_FILE):
        raw = bytearray(file.read_bytes())
        raw[-200 if file.name == DATA_FILE else -1] ^= 1
        file.write_bytes(raw)
    with pytest.raises(DigestMismatch):
        pull_weights(local, source, 9)
    with pytest.raises((ValueError, DigestMismatch)):
        pull_weights(local, source, 5)
    assert holds(local, 2) and no_leftovers(local)


def test_a_version_that_was_written_anew_is_pulled_again(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 9)
    shutil.rmtree(version_folder(source, 9))
    save_folder(version_folder(source, 9), STATES[5].items(), "9")
    assert pull_weights(local, source, 9).base_version == 9
    assert torch.equal(loaded(local)["b"], STATES[5]["b"])


def test_deltas_without_digests_of_the_result_are_applied_unverified(tmp_path):
    source, local = tmp_path / "shared", tmp_path / "local"
    publish(source, 1)
    publish(source, 2, with_digests=False)
    (version_folder(source, 1) / MANIFEST_FILE).unlink()  # a folder of another writer
    assert not pull_weights(local, source, 1).verified
    assert not pull_weights(local, source, 2).verified
    assert not pull_weights(local, source, 2).verified  # also when nothing has to be done
    assert holds(local, 2)


def test_files_beside_a_delta_replace_those_of_the_base(tmp_path, source):
    (version_folder(source, 3) / "config.json").write_text("{}")
    local = tmp_path / "local"
    pull_weights(local, source, 5)
    assert (local / "config.json").read_text() == "{}" and (local / "tokenizer.json").read_text() == "{}"
    assert not (local / DATA_FILE).exists()


@pytest.mark.parametrize("missing", [1, 2, 3, 5])
def test_a_missing_link_is_named_with_the_chain_that_needs_it(tmp_path, source, missing):
    shutil.rmtree(version_folder(source, missing))
    with pytest.raises(ValueError, match=rf"version {missing} is missing .*holds weight_v0000"):
        pull_weights(tmp_path / "local", source, 5)
    assert not (tmp_path / "local").exists()


def test_links_and_versions_that_lead_elsewhere_are_refused(tmp_path, source):
    local = tmp_path / "local"
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (version_folder(source, 1) / "secret.json").symlink_to(secret)
    with pytest.raises(ValueError, match=r"lead out of .*secret\.json"):
        pull_weights(local, source, 2)
    (version_folder(source, 1) / "secret.json").unlink()
    (version_folder(source, 1) / "tokenizer.json").unlink()
    (version_folder(source, 1) / "tokenizer.json").symlink_to("config.json")  # a link within the source is allowed
    pull_weights(local, source, 2)
    assert not (local / "tokenizer.json").is_symlink()
    shutil.copytree(version_folder(source, 9), tmp_path / "elsewhere")
    version_folder(source, 11).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="lead out of"):
        pull_weights(local, source, 11)
    for base in ("../../etc", "7", "8", "-1", None):
        folder = version_folder(source, 7)
        save_delta(folder, base, "7", encode_delta(STATES[1], STATES[2].items()))
        with pytest.raises(ValueError, match="no version before 7"):
            pull_weights(local, source, 7)
        shutil.rmtree(folder)


def test_arguments_that_could_destroy_something_are_refused(tmp_path, source):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for local, message in {
        tmp_path / "home": "was not made by a pull",
        tmp_path / "file": "is not a folder",
        source / "inside": "must not lie in each other",
        tmp_path: "must not lie in each other",
    }.items():
        with pytest.raises(ValueError, match=message):
            pull_weights(local, source, 1)
    for version in (-1, "1", True, 1.0):
        with pytest.raises(ValueError, match="non-negative integer"):
            pull_weights(tmp_path / "local", source, version)
    with pytest.raises(ValueError, match="is not a folder"):
        pull_weights(tmp_path / "local", tmp_path / "none", 1)
    assert (tmp_path / "home" / "thesis.txt").exists()


def test_a_deadline_leaves_the_local_folder_and_the_next_pull_goes_on(tmp_path, source):
    local = tmp_path / "local"
    pull_weights(local, source, 2)
    with pytest.raises(TransferFailed, match="deadline"):
        pull_weights(local, source, 5, timeout_s=-1.0)
    assert holds(local, 2)
    pull_weights(local, source, 5)
    assert holds(local, 5) and no_leftovers(local)


# --- killed at any step


STEPS = [
    "flush_folder",
    *(pytest.param(step, marks=pytest.mark.slow) for step in ("_copy", "apply_delta", "_write_state", "_digested")),
    *(pytest.param(step, marks=pytest.mark.slow) for step in ("rename", "read_folder", "rmtree")),
]


def _killed_pull(local: Path, source: Path, version: int, step: str, count: int, is_before: bool) -> None:
    """Pull, and end the process at the `count`-th call of a step, before or after it."""
    owner = {"rename": Path, "rmtree": pull.shutil}.get(step, pull)
    real, calls = getattr(owner, step), iter(range(1000))

    def dying(*args, **kwargs):
        is_last = next(calls) == count
        if is_last and is_before:
            os._exit(9)
        value = real(*args, **kwargs)
        if is_last:
            os._exit(9)
        return value

    setattr(owner, step, dying)
    pull_weights(local, source, version)
    os._exit(0)


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_step_a_pull_shows_no_half_folder_and_can_be_completed(tmp_path, source, step):
    context = multiprocessing.get_context("fork")
    num_killed = 0
    for start, is_before in ((None, True), (2, True), (2, False)):
        for count in range(100):
            local = tmp_path / f"{start}-{is_before}-{count}" / "local"
            if start is not None:
                pull_weights(local, source, start)
            child = context.Process(target=_killed_pull, args=(local, source, 5, step, count, is_before))
            child.start()
            child.join(30)
            assert child.exitcode in (0, 9)
            if local.exists():
                assert holds(local, 5) or holds(local, start)
            pull_weights(local, source, 5)
            assert holds(local, 5) and no_leftovers(local)
            if child.exitcode == 0:
                break
            num_killed += 1
    assert num_killed >= 3


def _half_written(local: Path, source: Path) -> None:
    """Pull, and end the process while it writes a chunk into its file."""
    real = pull.FolderSink.write_elements

    def dying(self, name, positions, values):
        half = positions.numel() // 2
        real(self, name, positions[:half], values[:half])
        if half:
            os._exit(9)

    pull.FolderSink.write_elements = dying
    pull_weights(local, source, 5)


def test_killed_in_the_middle_of_a_chunk_the_next_pull_starts_anew(tmp_path, source):
    local = tmp_path / "local"
    child = multiprocessing.get_context("fork").Process(target=_half_written, args=(local, source))
    child.start()
    child.join(30)
    assert child.exitcode == 9 and not local.exists()
    assert pull_weights(local, source, 5).verified
    assert holds(local, 5) and no_leftovers(local)


def test_two_pulls_into_one_folder_do_not_meet(tmp_path, source, monkeypatch):
    local = tmp_path / "local"
    real = pull._copy

    def second(*args):
        with pytest.raises(TransferFailed, match="another pull"):
            pull_weights(local, source, 3)
        return real(*args)

    monkeypatch.setattr(pull, "_copy", second)
    pull_weights(local, source, 2)
    assert holds(local, 2)


def test_a_source_file_that_changes_while_it_is_copied_fails_the_pull(tmp_path, source, monkeypatch):
    local, real = tmp_path / "local", os.sendfile

    def sendfile(out: int, in_: int, offset: int, count: int) -> int:
        os.utime(version_folder(source, 1) / "config.json", ns=(1, 1))
        return real(out, in_, offset, count)

    monkeypatch.setattr(os, "sendfile", sendfile)
    with pytest.raises(TransferFailed, match=r"config\.json changed"):
        pull_weights(local, source, 1)
    assert not local.exists()


def test_a_marker_that_was_damaged_means_pull_again(tmp_path, source):
    local = tmp_path / "local"
    for text in ("{", "[]", json.dumps({"version": "5"})):
        pull_weights(local, source, 5)
        (local / PULL_FILE).write_text(text)
        assert pull_weights(local, source, 5).base_version == 1
        assert holds(local, 5)
