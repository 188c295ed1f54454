"""Checkpoints on disk: whole or absent, checked when they are read, named so that no other file is touched."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.integration.tinker.serving.promises import failure
from lockstep.integration.tinker.training import checkpoints as module
from lockstep.integration.tinker.training.checkpoints import (
    CheckpointInfo,
    Checkpoints,
    Content,
    RunInfo,
    adapter_digest,
)
from lockstep.integration.tinker.training.data import BadInput
from lockstep.integration.tinker.training.targets import AdapterSpec
from lockstep.tests.support.random_models import random_model
from lockstep.tests.support.tinker_client import Client, Failed, datum
from lockstep.weight_sync.disk.atomic_folder import partial_folder

DATA = [datum([1, 2, 3], target_tokens=[2, 3, 4])]
WEIGHTS = {"a.lora_A.weight": torch.ones(1, 3), "a.lora_B.weight": torch.zeros(2, 1)}


def content(value: float = 1.0) -> tuple[CheckpointInfo, Content]:
    weights = {name: own + value for name, own in WEIGHTS.items()}
    info = CheckpointInfo("tinker://run:0/weights/one", "base", "d", adapter_digest(weights), AdapterSpec(1), 5.0)
    return info, Content(weights, {"r": 1}, weights, {f"step/{name}": torch.tensor(3.0) for name in weights})


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    kept = Checkpoints(tmp_path)
    info, written = content()
    info = kept.write(info, written)
    assert info.num_bytes > 0 and kept.info(info.path) == info
    found = kept.read(info, torch.device("cpu"), training=True)
    assert found.config == {"r": 1} and found.moments.keys() == written.moments.keys()
    for one, other in ((found.weights, written.weights), (found.masters, written.masters)):
        assert {name: own.tolist() for name, own in one.items()} == {name: own.tolist() for name, own in other.items()}


def test_a_name_is_taken_once_unless_it_is_overwritten_and_a_failure_leaves_the_former(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    first = kept.write(*content())
    with pytest.raises(BadInput, match="exists already"):
        kept.write(*content(2.0))
    monkeypatch.setattr(module, "save_file", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        kept.write(*content(2.0), overwrite=True)
    assert kept.info(first.path) == first
    monkeypatch.undo()
    second = kept.write(*content(2.0), overwrite=True)
    assert kept.info(first.path).digest == second.digest != first.digest
    assert [path.name for path in (tmp_path / "run:0" / "weights").iterdir()] == ["one"]


def test_a_full_disk_is_named_with_the_checkpoint(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    reason = r"run:0/weights/one cannot be written: No space left on device; make room there"
    with pytest.raises(OSError, match=reason) as failed:
        kept.write(*content())
    told = json.loads(failure(failed.value).body)
    assert told == {"error": str(failed.value), "category": "server"}


def test_a_checkpoint_that_is_overwritten_is_there_all_the_time(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    first = kept.write(*content())
    found, save = [], module.save_file

    def saved(*args: object) -> None:
        found.append(kept.info(first.path))
        kept.read(found[-1], torch.device("cpu"), training=True)
        save(*args)

    monkeypatch.setattr(module, "save_file", saved)
    second = kept.write(*content(2.0), overwrite=True)
    assert found == [first, first] and kept.info(first.path) == second != first


class Names:
    """A lock that looks at a checkpoint's name whenever it is taken and released."""

    def __init__(self, folder) -> None:
        self._folder, self.seen, self.is_held = folder, [], False

    def __enter__(self) -> None:
        self.is_held = True
        self.seen.append(self._folder.exists())

    def __exit__(self, *_: object) -> None:
        self.seen.append(self._folder.exists())
        self.is_held = False


def test_lookups_wait_while_the_name_goes_from_one_checkpoint_to_the_other(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    first = kept.write(*content())
    names = Names(tmp_path / "run:0" / "weights" / "one")
    monkeypatch.setattr(kept, "_names", names)
    rename, held = module.Path.rename, []
    monkeypatch.setattr(module.Path, "rename", lambda *args: (held.append(names.is_held), rename(*args))[1])
    kept.write(*content(2.0), overwrite=True)
    assert held == [True, True] and all(names.seen)
    kept.info(first.path)
    assert len(names.seen) == 4


def test_what_a_killed_process_was_about_to_replace_comes_back(tmp_path):
    kept = Checkpoints(tmp_path)
    first = kept.write(*content())
    folder = tmp_path / "run:0" / "weights" / "one"
    folder.rename(folder.with_name(".one.former"))
    assert Checkpoints(tmp_path).info(first.path) == first
    folder.with_name(".one.former").mkdir()
    assert Checkpoints(tmp_path).info(first.path) == first
    assert not folder.with_name(".one.former").exists()


@pytest.mark.parametrize("has_expired", [False, True])
def test_the_name_of_a_checkpoint_whose_removal_was_interrupted_is_free(tmp_path, monkeypatch, has_expired):
    kept = Checkpoints(tmp_path)
    info, written = content()
    info = kept.write(replace(info, expires_at=time.time() - 1 if has_expired else None), written)
    parent = tmp_path / "run:0" / "weights"

    def broken(folder: Path, **_: object) -> None:
        for file in folder.glob("checkpoint.json"):
            file.unlink()
            raise OSError("interrupted")

    monkeypatch.setattr(module.shutil, "rmtree", broken)
    with pytest.raises(OSError, match="interrupted"):
        kept.info(info.path) if has_expired else kept.delete(info.path)
    monkeypatch.undo()
    with pytest.raises(BadInput, match="there is no checkpoint"):
        kept.info(info.path)
    assert kept.of_run("run:0") == [] and len(list(parent.iterdir())) == 1
    again = kept.write(*content())
    assert Checkpoints(tmp_path).info(info.path) == again and [path.name for path in parent.iterdir()] == ["one"]
    kept.delete(info.path)
    assert not list(parent.iterdir())


@pytest.mark.parametrize("middle", ["weights", "sampler_weights"])
def test_what_a_killed_process_had_not_written_to_its_end_is_removed(tmp_path, middle):
    program = f"""
import os
from lockstep.weight_sync.disk.atomic_folder import partial_folder
with partial_folder({str(tmp_path)!r} / Path("run:0/{middle}/one")) as folder:
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", "from pathlib import Path\n" + program], check=True)
    parent = tmp_path / "run:0" / middle
    assert len(list(parent.iterdir())) == 2
    Checkpoints(tmp_path)
    assert not list(parent.iterdir())
    with partial_folder(parent / "two") as mine:
        Checkpoints(tmp_path)
        assert mine.is_dir() and len(list(parent.iterdir())) == 2, "that of a living process stays"


@pytest.mark.parametrize(
    "path",
    ["tinker://run/weights/..", "tinker://../weights/a", "tinker://run/weights/.hidden", "tinker://run/other/a", "run",
     "tinker://run/weights/a/b", "tinker://run/weights/", "tinker://run/weights/a\n", "file:///etc/weights/passwd"],
)  # fmt: skip
def test_paths_name_checkpoints_and_nothing_else(tmp_path, path):
    with pytest.raises(BadInput):
        Checkpoints(tmp_path).info(path)


def test_tensors_that_are_not_those_that_were_written_are_refused(tmp_path):
    kept = Checkpoints(tmp_path)
    info = kept.write(*content())
    file = tmp_path / "run:0" / "weights" / "one" / "adapter_model.safetensors"
    save_file({name: own + 1 for name, own in load_file(file).items()}, file)
    with pytest.raises(BadInput, match="has other tensors than were written to it"):
        kept.read(info, torch.device("cpu"), training=True)
    file.write_bytes(b"broken")
    with pytest.raises(BadInput, match="cannot be read"):
        kept.read(info, torch.device("cpu"), training=True)


def test_checkpoints_expire(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    info = kept.write(*content())
    kept.set_expiry(info.path, time.time() + 3600)
    assert len(kept.of_run("run:0")) == 1
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 3601)
    with pytest.raises(BadInput, match="has expired"):
        kept.info(info.path)
    with pytest.raises(BadInput, match="there is no checkpoint"):
        kept.info(info.path)


def test_expired_checkpoints_are_removed_and_no_others(tmp_path, caplog, monkeypatch):
    kept = Checkpoints(tmp_path)
    info, written = content()
    for name, expires_at in (("gone", time.time() - 1), ("later", time.time() + 3600), ("one", None)):
        path = f"tinker://run:0/weights/{name}"
        kept.write(replace(info, path=path, expires_at=expires_at), written)
        kept.write(replace(info, path=path.replace("run:0", "run:1"), expires_at=expires_at), written)
    broken = tmp_path / "run:0" / "weights" / "broken"
    broken.mkdir()
    (broken / "checkpoint.json").write_text("{}")
    rmtree, failures = module.shutil.rmtree, [OSError("busy")]

    def remove(path: Path) -> None:
        if failures:
            raise failures.pop()
        rmtree(path)

    monkeypatch.setattr(module.shutil, "rmtree", remove)
    kept.remove_expired()
    left = {run: {path.name for path in (tmp_path / run / "weights").glob("[!.]*")} for run in ("run:0", "run:1")}
    assert left == {"run:0": {"later", "one", "broken"}, "run:1": {"later", "one"}}
    assert "busy" in caplog.text and "broken" not in caplog.text


def test_a_server_removes_expired_checkpoints_by_itself(serve, folder, monkeypatch):
    kept = Checkpoints(folder / "checkpoints")
    info, written = content()
    kept.write(replace(info, expires_at=time.time() - 1), written, overwrite=True)
    was_called, remove = threading.Event(), Checkpoints.remove_expired

    def removed(checkpoints: Checkpoints) -> None:
        remove(checkpoints)
        was_called.set()

    monkeypatch.setattr(Checkpoints, "remove_expired", removed)
    with serve():
        assert was_called.wait(30)
    assert not (folder / "checkpoints" / "run:0" / "weights" / "one").exists()


class Turn:
    """A lock before whose first use something else is written."""

    def __init__(self, meanwhile) -> None:
        self._meanwhile, self._lock = meanwhile, threading.RLock()

    def __enter__(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_reader_that_saw_an_expired_checkpoint_leaves_the_one_that_took_its_place(tmp_path, monkeypatch):
    kept, others = Checkpoints(tmp_path), Checkpoints(tmp_path)
    info, written = content()
    kept.write(replace(info, expires_at=time.time() - 1), written)
    monkeypatch.setattr(kept, "_lock", Turn(lambda: others.write(info, written, overwrite=True)), raising=False)
    assert kept.info(info.path).expires_at is None
    assert kept.read(kept.info(info.path), torch.device("cpu"), training=True).config == {"r": 1}


def test_an_expiry_that_is_set_while_a_checkpoint_is_replaced_is_that_of_the_new_one(tmp_path, monkeypatch):
    kept, others = Checkpoints(tmp_path), Checkpoints(tmp_path)
    kept.write(*content())
    newer = content(2.0)
    monkeypatch.setattr(kept, "_lock", Turn(lambda: others.write(*newer, overwrite=True)), raising=False)
    until = time.time() + 5000
    kept.set_expiry(newer[0].path, until)
    found = kept.info(newer[0].path)
    assert (found.digest, found.expires_at) == (newer[0].digest, until)
    kept.read(found, torch.device("cpu"), training=True)


def test_the_name_of_an_expired_checkpoint_is_free(tmp_path):
    kept = Checkpoints(tmp_path)
    info, written = content()
    kept.write(replace(info, expires_at=time.time() - 1), written)
    newer = content(2.0)
    assert kept.write(*newer).digest == kept.info(info.path).digest == newer[0].digest
    with pytest.raises(BadInput, match="exists already"):
        kept.write(*content(3.0))


def test_a_description_that_cannot_be_written_is_as_it_was(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path)
    info = kept.write(*content())
    run = RunInfo("run:0", "base", AdapterSpec(1), 5.0)
    kept.note_run(run)
    full = lambda *_: (_ for _ in ()).throw(OSError("no space"))  # noqa: E731
    monkeypatch.setattr(module, "flush", full, raising=False)
    with pytest.raises(OSError, match="no space"):
        kept.set_expiry(info.path, time.time() + 5000)
    with pytest.raises(OSError, match="no space"):
        kept.note_run(replace(run, created=6.0))
    assert kept.info(info.path) == info and kept.runs() == [run]
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"spec": {"rank": 1}, "x": 1}'])
def test_unreadable_descriptions_are_passed_over_in_lists_and_named_alone(tmp_path, broken):
    kept = Checkpoints(tmp_path)
    info = kept.write(*content())
    run = RunInfo("run:0", "base", AdapterSpec(1), 5.0)
    for name in ("run:0", "run:1"):
        kept.note_run(replace(run, run_id=name))
    (tmp_path / "run:1" / "run.json").write_text(broken)
    (tmp_path / "run:0" / "weights" / "two").mkdir()
    (tmp_path / "run:0" / "weights" / "two" / "checkpoint.json").write_text(broken)
    (tmp_path / "not a run").mkdir()
    (tmp_path / "not a run" / "run.json").write_text("{}")
    assert kept.runs() == [run] and kept.of_run("run:0") == [info]
    for read, what in ((lambda: kept.run("run:1"), "training run"), (lambda: kept.info(info.path[:-3] + "two"), "two")):
        with pytest.raises(BadInput, match=f"{what}.* cannot be read"):
            read()


def test_verbs_of_checkpoints_over_http(client):
    model = client.model(rank=2)
    model.train(DATA)
    path = model.call("save_weights", path="one", ttl_seconds=7200, user_metadata={"a": "b"})["path"]
    with pytest.raises(Failed, match="exists already"):
        model.call("save_weights", path="one")
    model.train(DATA)
    assert model.call("save_weights", path="one", overwrite=True, ttl_seconds=7200)["path"] == path
    for wrong in ({"path": "../out"}, {"path": "two", "ttl_seconds": 5}):
        with pytest.raises(Failed, match=r"name of a checkpoint|ttl_seconds must be from 3600"):
            model.call("save_weights", **wrong)
    unnamed = model.call("save_weights")["path"]
    sampler = model.call("save_weights_for_sampler", path="one")["path"]
    run = client.get(f"training_runs/{model.model_id}")
    assert run["lora_rank"] == 2 and run["last_checkpoint"]["tinker_path"] == unnamed
    listed = client.get(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
    assert {one["tinker_path"] for one in listed} == {path, unnamed, sampler}
    assert {one["checkpoint_id"] for one in listed} >= {"weights/one", "sampler_weights/one"}
    assert client.get("checkpoints?limit=1")["cursor"]["total_count"] >= 3
    assert client.get("training_runs?limit=1")["training_runs"][0]["training_run_id"] == model.model_id
    assert client.post("weights_info", tinker_path=path)["lora_rank"] == 2
    assert client.get(f"sessions/{client.session}")["training_run_ids"] == [model.model_id]
    at = f"training_runs/{model.model_id}/checkpoints"
    assert client.http.put(f"{at}/weights/one/ttl", json={}).status_code == 204
    wrong = client.http.put(f"{at}/weights/one/ttl", json={"ttl_seconds": 5})
    assert wrong.status_code == 400 and "ttl_seconds must be from 3600" in wrong.json()["detail"]
    assert client.http.delete(f"{at}/sampler_weights/one").status_code == 204
    assert client.http.delete(f"{at}/sampler_weights/one").status_code == 404
    for missing in ("training_runs/nobody", "training_runs/..%2f..", "sessions/nobody"):
        assert client.http.get(missing).status_code == 404
    sampling = {"session_id": client.session, "sampling_session_seq_id": 77, "model_path": sampler}
    assert client.http.post("create_sampling_session", json=sampling).status_code == 400
    with pytest.raises(Failed, match="save_weights_external is not supported"):
        model.call("save_weights_external", path="one")


def test_loads_of_other_kinds_and_other_bases_are_refused_and_change_nothing(serve, tmp_path, client):
    model = client.model(rank=2)
    model.train(DATA)
    path = model.call("save_weights", path="state")["path"]
    sampler = model.call("save_weights_for_sampler", path="only")["path"]
    other = client.model(rank=3)
    before = other.run(DATA, forward_only=True)[1]
    for wrong, reason in ((path, "rank=2"), (sampler, "for sampling only"), (path + "x", "there is no checkpoint")):
        with pytest.raises(Failed, match=reason):
            other.call("load_weights", path=wrong, optimizer=True)
    assert other.run(DATA, forward_only=True)[1] == before

    from lockstep.tests.integration.tinker.conftest import serving

    torch.manual_seed(99)
    random_model("qwen3").save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    save_file({name: own * 2 for name, own in load_file(weights).items()}, weights, {"format": "pt"})
    with serve() as same:
        folder = same.trainer.checkpoints.folder
    (tmp_path / "checkpoints").symlink_to(folder)
    with serving(tmp_path) as server, Client(server.url) as stranger:
        with pytest.raises(Failed, match="is of another base model"):
            stranger.model_from(path, optimizer=False)
        assert "is of another base" in json.dumps(str(_refusal(stranger, sampler)))


def _refusal(client: Client, path: str) -> Exception:
    with pytest.raises(Failed) as failed:
        client.sampler(path).draw([1], max_tokens=1)
    return failed.value
