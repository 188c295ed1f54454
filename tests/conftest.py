"""Fixtures of many tests: models, ranks, and waiting for a condition.

Every test loads this file, tests of modules without torch too: fixtures import their modules when they are used.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from lockstep.tests.optional_packages import what_was_missing, why_skipped
from lockstep.tests.support.callers import wait_until

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def has_gpu() -> bool:
    """Return whether torch has a GPU. Without a driver it has none, and torch is not imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


pytest_plugins = ("lockstep.tests.support.time_limits",)

# Where no GPU can run its kernels Triton interprets them. It reads this as it is imported, which transformers does.
os.environ.setdefault("TRITON_INTERPRET", str(int(not has_gpu())))

# Tests plant faults that a check must find: none may be passed by what an earlier process has found.
os.environ["LOCKSTEP_KEPT_CHECKS"] = "0"

# A forked rank must not collect this process's unreachable objects: a process group's destructor waits for its threads,
# which a fork does not have, and aborts.
os.register_at_fork(after_in_child=gc.freeze)

_HUGE_PAGE, _MADV_COLLAPSE = 2**21, 25  # of x86-64 and of <linux/mman.h>

# The modules that take longest, about in descending order. They run first, so that no process runs one of them in the
# end while the others are idle.
LONGEST = (
    # by turns those that compute and those that wait
    "kernels/linear/test_linear", "replica/test_rank_failures", "replica/test_interruption", "states/test_engine",
    "replica/test_faults", "kernels/test_triton_compiles", "rollout/test_invariance_table", "torture/test_torture",
    "rollout/test_partial_attention", "kernels/test_triton_engine", "transaction/test_fault_injection",
    "examples/test_smollm2", "grpo/test_ahead", "edge/test_malformed", "grpo/test_job", "running/test_cpu_graphs",
    "admin/test_recorder", "sampling/test_segments", "push/test_verb_server", "kernels/test_emulated_amx",
    "rollout/test_interruption", "replica/test_engine", "own_attention/test_families",
    "integration/test_collective_watch", "speculation/test_equality", "delta/test_pull", "weights/test_sharded_engines",
    "push/test_http_target", "push/test_lost_pushers",
    "http/test_replica", "transaction/test_chaos", "push/test_pushed_engines", "attention/test_triton_row_ends",
    "generation/test_limits", "backends/test_backend", "weights/test_sharded_failures",
    "rollout/test_interruption_random", "ranks/test_channel", "attention/test_triton_kernels", "http/test_draining",
    "router/test_chaos", "router/test_moving",
    "kernels/test_triton_launches", "grammars/test_engine", "gpus/test_several_gpus", "cli/test_served_model",
    "speculation/test_random_traces", "examples/test_examples", "explain/test_runs", "grpo/test_parallel",
    "grpo/test_syncs", "tasks/test_pictures", "admin/test_control", "group/test_registry",
)  # fmt: skip


class SkippedModule(pytest.Module):
    """A module of tests that is skipped unread, for what it needs is not here."""

    def collect(self) -> NoReturn:
        pytest.skip(why_skipped(self.path) or "", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return SkippedModule.from_parent(parent, path=module_path) if why_skipped(module_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as skipped that ended because an optional package is missing."""
    report = yield
    if report.failed and call.excinfo and (missing := what_was_missing(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, f"Skipped: {missing}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules without slow tests unread where slow tests alone are asked for: that is most of a collection."""
    is_slow_alone = str(config.option.markexpr).startswith("slow")
    if is_slow_alone and collection_path.name.startswith("test_") and not _says_slow(collection_path):
        return True
    return None


@functools.cache
def _says_slow(path: Path) -> bool:
    return "slow" in path.read_text(encoding="utf-8").lower()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not _says_slow(item.path):
            raise pytest.UsageError(f"{item.nodeid} is slow, and its module does not say so: `-m slow` leaves it out")

    def place(item: pytest.Item) -> int:
        module = item.path.with_suffix("").as_posix()
        return next((index for index, name in enumerate(LONGEST) if module.endswith(name)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Fork the process that starts the programs of tests, before a test changes anything here or begins a thread.

    Half a million objects of imported modules stay until the end: the garbage collector need not look through them in
    the middle of each test.
    """
    gc.enable()  # before the fork, whose programs collect theirs
    if "PYTEST_XDIST_WORKER" in os.environ:
        _collapse_pages()
    prepared = sys.modules.get("lockstep.tests.support.prepared_python")
    if prepared and not prepared.HAS_GPU:
        prepared.prepare()
    gc.collect()
    gc.freeze()


def _collapse_pages() -> None:
    """Put what this process has in memory into huge pages, as far as the kernel can (Linux 6.1 and later).

    Ranks of tests are forks, and a fork copies the tables of all pages: a quarter of the suites' time in the system.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-first // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                # fails where not all of it is in memory
                libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE), _MADV_COLLAPSE)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extension modules name what is left at the end of the process


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """Return a function of family and options, as make_model("gemma2", dtype=torch.bfloat16).

    It makes a random model whose logits are far from uniform.
    """
    from lockstep.tests.support.random_models import random_model

    return random_model


@pytest.fixture
def model(make_model: Callable[..., PreTrainedModel], restore_threads: None) -> PreTrainedModel:
    """Make the model of most tests of a served engine; torch has one thread."""
    import torch

    torch.set_num_threads(1)
    return make_model("qwen2")


@pytest.fixture
def shm() -> Iterator[Path]:
    """Make a folder for segments and checkpoints; fails if a file is left in it at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []


@pytest.fixture
def restore_threads():
    """Restore torch's thread count after a test that changes it."""
    import torch

    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def restore_log_level() -> Iterator[None]:
    """Restore the level of the package's logger, which the commands of `lockstep` set for their whole process."""
    ours = logging.getLogger("lockstep")
    level = ours.level
    yield
    ours.setLevel(level)


@pytest.fixture
def until() -> Callable[..., None]:
    """Return `wait_until`, for until(condition)."""
    return wait_until


@pytest.fixture
def run_world() -> Callable[..., list[object]]:
    """Return `world.run_world`, for run_world(4, rank_function)."""
    from lockstep.tests.support.world import run_world

    return run_world


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE of 1,000 tokens with `train_tokenizer`."""
    from lockstep.tests.support.bpe_tokenizer import train_tokenizer

    return train_tokenizer()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests recorded (`record_property("figures", ...)`), of all processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.section(report.nodeid)
                terminalreporter.line(str(text))
