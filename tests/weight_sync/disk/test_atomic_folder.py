"""Folders that appear whole have the files that were written to them, for the readers that the umask allows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from lockstep.integration.grpo.results.model_folder import write_model_folder
from lockstep.integration.tinker.training.checkpoints import CheckpointInfo, Checkpoints, Content, adapter_digest
from lockstep.integration.tinker.training.targets import AdapterSpec
from lockstep.weight_sync.disk.atomic_folder import atomic_folder

TENSORS = {"a": torch.ones(1)}


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002])
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def save_checkpoint(path, tmp_path):
    info = CheckpointInfo("tinker://run/weights/one", "base", "d", adapter_digest(TENSORS), AdapterSpec(1), 5.0)
    Checkpoints(tmp_path).write(info, Content(TENSORS, {}, TENSORS))
    return tmp_path / "run" / "weights" / "one"


def save_model(path, _):
    write_model_folder(path, lambda empty: save_file(TENSORS, empty / "model.safetensors"), lambda: None)
    return path


def save_atomically(path, _):
    with atomic_folder(path) as empty:
        save_file(TENSORS, empty / "model.safetensors")
        (empty / "text").write_text("text")
        (empty / "private").touch(0o600)
        (empty / "folder").mkdir()
    assert (path / "private").stat().st_mode & 0o777 == 0o600
    (path / "private").unlink()
    (path / "folder").rmdir()
    return path


@pytest.mark.parametrize("save", [save_checkpoint, save_model, save_atomically])
def test_files_of_tensors_have_the_permissions_that_the_umask_gives(tmp_path, umask, save):
    folder = save(tmp_path / "new", tmp_path)
    found = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert found and set(found.values()) == {0o666 & ~umask}, found
