"""Tests of the modules that are skipped where packages are missing."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from lockstep.tests import optional_packages
from lockstep.tests.optional_packages import (
    INTERPRETED,
    NEEDS,
    TESTS,
    needs_of,
    why_not_interpreted,
    why_skipped,
)


def test_every_place_that_needs_a_package_exists() -> None:
    assert [name for name in (*NEEDS, *INTERPRETED) if not (TESTS / name).exists()] == []


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the packages that are imported with a module of tests, by modules of tests that it imports too."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names = [str(node.module)] if isinstance(node, ast.ImportFrom) else names
        for name in names:
            inner = TESTS / (name.removeprefix("lockstep.tests.").replace(".", "/") + ".py")
            is_ours = name.startswith("lockstep.tests.") and inner.exists()
            found |= imported(inner) if is_ours else {name.partition(".")[0]}
    return frozenset(found)


def test_modules_that_import_a_package_that_may_be_missing_are_named() -> None:
    optional = {package for packages in NEEDS.values() for package in packages}
    lacking = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        needed = {name for name in imported(path) & optional if f'importorskip("{name}' not in text}
        if unnamed := needed - set(needs_of(path)):
            lacking[path.relative_to(TESTS).as_posix()] = sorted(unnamed)
    assert lacking == {}


def test_a_module_needs_the_packages_of_its_folders_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TESTS / "integration/http/openai/test_openai.py"
    assert {"openai", "uvicorn"} <= set(needs_of(module))
    assert needs_of(TESTS / "rollout/test_invariance_table.py") == ()
    optional_packages._is_there.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else object())
    assert why_skipped(module) == "not installed: openai"
    assert why_skipped(TESTS / "integration/http/test_app.py") is None
    optional_packages._is_there.cache_clear()


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"), [("3.6.0", "2.3.5", True), ("3.6.0", "2.5.2", False), ("3.9.0", "2.4.6", True)]
)
def test_tests_of_interpreted_kernels_are_skipped_where_numpy_is_too_new_for_triton(
    triton: str, numpy: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_not_interpreted.cache_clear()
    monkeypatch.setattr(optional_packages, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = why_skipped(TESTS / INTERPRETED[0])
    assert reason is None if runs else "Triton 3.6 needs numpy below 2.4" in reason
    why_not_interpreted.cache_clear()
