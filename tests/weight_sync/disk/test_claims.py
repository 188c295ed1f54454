"""Leftovers of dead processes are removed, and never the folder of a living one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from lockstep.tests.support.full_disks import no_file_above
from lockstep.weight_sync.disk.atomic_folder import atomic_folder
from lockstep.weight_sync.disk.claims import SUFFIX, claimed_folder, close_locked, open_locked, remove_leftovers

# A process that fills a folder, says so, and waits. Its own forked child waits longer and holds no claim.
WRITER = """
import os, sys
from pathlib import Path
from lockstep.weight_sync.disk.atomic_folder import atomic_folder

with atomic_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_bytes(b"x" * 100)
    runs, says = os.pipe()
    if os.fork() == 0:
        os.close(1)
        os.write(says, b"x")  # it has closed what it shared
        os.read(0, 1)
        os._exit(0)
    os.read(runs, 1)
    print(partial.name, flush=True)
    os.read(0, 1)
"""


@contextmanager
def writer(target):
    """Start a process that is writing `target`. Yields it and the name of its part."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", WRITER, str(target)]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as process:
        os.close(reading)
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()  # before it could write on
            os.close(writing)  # ends the child too


def test_the_part_of_a_killed_process_goes_with_the_next_write_and_that_of_a_living_one_stays(tmp_path):
    with writer(tmp_path / "dead") as (killed, dead), writer(tmp_path / "alive") as (process, alive):
        killed.kill()
        killed.wait()
        assert (tmp_path / dead / "half").exists()
        with atomic_folder(tmp_path / "next"):
            assert not (tmp_path / dead).exists()
            assert (tmp_path / alive / "half").exists() and process.poll() is None
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


def test_a_write_that_fails_leaves_nothing_and_names_its_target(tmp_path):
    with pytest.raises(OSError, match="File too large") as failed, no_file_above(1000):  # noqa: SIM117
        with atomic_folder(tmp_path / "big") as partial:
            (partial / "file").write_bytes(b"x" * 2000)
    assert failed.value.filename == str(tmp_path / "big")
    assert list(tmp_path.iterdir()) == []


def test_folders_without_a_claim_of_ours_are_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"mine{SUFFIX}").symlink_to(tmp_path / "mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "notes").write_text("")
    os.link(tmp_path / "notes", tmp_path / f"other{SUFFIX}")
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / f"link{SUFFIX}").write_text("")
    assert remove_leftovers(tmp_path) == []
    assert all((tmp_path / name).is_dir() for name in ("mine", "other", "target", "link"))
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_only_the_folders_of_a_pattern_are_removed(tmp_path):
    for name in ("a-1", "b-1"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}{SUFFIX}").write_text("")
    assert remove_leftovers(tmp_path, "a-*") == [tmp_path / "a-1"]
    assert (tmp_path / "b-1").exists()


def test_a_claimed_folder_goes_at_the_end_and_a_lock_is_taken_once(tmp_path):
    with claimed_folder(tmp_path / "sockets", 0o700) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert remove_leftovers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    lock = open_locked(tmp_path / "lock")
    assert open_locked(tmp_path / "lock") is None
    close_locked(lock)
    again = open_locked(tmp_path / "lock")
    close_locked(again)
