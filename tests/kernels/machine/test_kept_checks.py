"""Tests of the results of checks on disk: what they depend on, and that nobody else's file is believed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.kernels import self_test as self_tests
from lockstep.kernels.linear.linear import product_of
from lockstep.kernels.machine import kept_checks, native
from lockstep.kernels.self_test import Candidate, self_test

SUBJECT = [("a", 1), torch.float32]
VALUE = {"gap": 0.25, "reason": "equal bits", "seconds": 1e-3}
SHAPES = [(40, 24), (24, 40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "1")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_what_was_kept_is_found_under_the_same_kind_and_subject_alone(folder: Path) -> None:
    assert kept_checks.kept("check", SUBJECT, VALUE) is None
    kept_checks.keep("check", SUBJECT, VALUE)
    assert kept_checks.kept("check", [("a", 1), torch.float32], VALUE) == VALUE
    assert kept_checks.kept("check", [("a", 1), torch.bfloat16], VALUE) is None
    assert kept_checks.kept("other", SUBJECT, VALUE) is None
    assert the_file(folder).stat().st_mode & 0o777 == 0o644 and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["LOCKSTEP_MAX_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"])
def test_a_variable_that_changes_instructions_asks_for_a_new_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    monkeypatch.setenv(name, "avx2")
    assert kept_checks.kept("check", SUBJECT, VALUE) is None


def test_other_arguments_of_the_compiler_ask_for_a_new_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        [compiler, *_] = native.find_compiler(os.environ)
    except native.NativeUnavailable:
        pytest.skip("needs a C++ compiler")
    kept_checks.keep("check", SUBJECT, VALUE)
    monkeypatch.setenv("CXX", f"{compiler} -ffast-math")
    assert kept_checks.kept("check", SUBJECT, VALUE) is None


def test_another_number_of_threads_or_another_code_asks_for_a_new_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, restore_threads: None
) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert kept_checks.kept("check", SUBJECT, VALUE) is None
    torch.set_num_threads(before)
    assert kept_checks.kept("check", SUBJECT, VALUE) == VALUE
    monkeypatch.setattr(kept_checks, "package_digest", lambda: "of other code")
    assert kept_checks.kept("check", SUBJECT, VALUE) is None


def test_the_digest_of_the_package_follows_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("kernels", "rollout"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(kept_checks, "_PACKAGE", tmp_path)
    digest = kept_checks.package_digest.__wrapped__
    seen = [digest()]
    for name, text in (("kernels/a.h", "// a\n"), ("rollout/a.py", "a = 2\n"), ("kernels/a.h", "// b\n")):
        (tmp_path / name).write_text(text)
        seen.append(digest())
    assert len(set(seen)) == 4
    (tmp_path / "kernels" / "notes.txt").write_text("no code")
    assert digest() == seen[-1]


def test_nothing_is_kept_where_it_is_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "0")
    assert kept_checks.kept("check", SUBJECT, VALUE) is None
    kept_checks.keep("more", SUBJECT, VALUE)
    assert the_file(folder).name.startswith("check-")


def test_a_damaged_file_is_not_used_and_is_written_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    for damaged in (b"{", b"null", b"[]", b"{}", b'{"other": 1}', b"\xff", b""):
        caplog.clear()
        the_file(folder).write_bytes(damaged)
        assert kept_checks.kept("check", SUBJECT, VALUE) is None and "is not used" in caplog.text
    kept_checks.keep("check", SUBJECT, VALUE)
    assert kept_checks.kept("check", SUBJECT, VALUE) == VALUE


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_others_can_write_is_not_believed(
    folder: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    the_file(folder).chmod(mode)
    assert kept_checks.kept("check", SUBJECT, VALUE) is None and f"has mode {mode:04o}" in caplog.text


def test_a_folder_that_others_can_write_is_neither_read_nor_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept_checks.keep("check", SUBJECT, VALUE)
    folder.chmod(0o777)
    assert kept_checks.kept("check", SUBJECT, VALUE) is None
    kept_checks.keep("more", SUBJECT, VALUE)
    assert the_file(folder).name.startswith("check-") and caplog.text.count("has mode 0777") == 2


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "1")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "file" / "cache"))
    kept_checks.keep("check", SUBJECT, VALUE)
    assert "is not kept" in caplog.text and kept_checks.kept("check", SUBJECT, VALUE) is None


IN_ANOTHER_PROCESS = f"""
import logging, torch
torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO)
from lockstep.kernels.self_test import Candidate, self_test
print(repr(self_test({SHAPES}, torch.bfloat16, torch.device("cpu"))))
"""


@pytest.mark.slow
def test_a_self_test_is_not_run_again_by_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_NATIVE", "0")  # nothing to compile in the new folder
    runs = [
        subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout and "invariant=True" in runs[0].stdout
    assert ["kept from an earlier process" in run.stderr for run in runs] == [False, True]


def test_a_self_test_without_a_library_says_nothing_of_a_process_that_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that failed once, for want of memory say, was kept as slower products for good."""
    monkeypatch.setattr(self_tests, "_known", {})
    load = native.load
    monkeypatch.setattr(native, "load", lambda source: None if source.startswith("linear/") else load(source))
    without = self_test(SHAPES, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(self_tests, "_known", {})
    again = self_test(SHAPES, torch.float32, torch.device("cpu"))
    assert without.linear == "padded" and len(list(folder.glob("self-test-*"))) == 2
    assert again.linear == ("native" if native.load("linear/linear.cpp") else "padded")


def test_candidates_of_the_caller_are_tried_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Candidate("rows", 1, product_of("rows"))]
    first = self_test(SHAPES, torch.float32, torch.device("cpu"), rows)  # loads the kernels
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "1")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    assert self_test(SHAPES, torch.float32, torch.device("cpu"), rows) is not first
    assert not (tmp_path / "cache").exists()
