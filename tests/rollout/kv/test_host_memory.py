"""The memory that a pool of automatic size takes its share of: the host's, within the limits of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.rollout.kv import tensors
from lockstep.rollout.kv.host_memory import available_host_bytes

MIB = 2**20


def a_host(root: Path, group: str = "", **files: str) -> Path:
    """Write the files of a host with 1000 MiB available. files: of its control groups, by path with __ for /."""
    given = {"proc/meminfo": f"MemTotal: {9000 * 1024} kB\nMemFree: {10 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n"}
    if group:
        given["proc/self/cgroup"] = group
    given |= {"sys/fs/cgroup/" + path.replace("__", "/"): text for path, text in files.items()}
    for path, text in given.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def in_group(**files: str) -> dict[str, str]:
    """Return files of one control group of version 2 by their names, with _ for the point."""
    return {name.replace("_", "."): text for name, text in files.items()}


def test_memory_of_cached_files_is_available(tmp_path):
    assert available_host_bytes(a_host(tmp_path)) == 1000 * MIB


def test_the_limit_of_a_container_less_its_use_counts_without_the_files_that_it_has_cached(tmp_path):
    group = in_group(memory_max=f"{400 * MIB}\n", memory_current=f"{150 * MIB}\n")
    host = a_host(tmp_path, "0::/\n", **group)
    assert available_host_bytes(host) == 250 * MIB
    (host / "sys/fs/cgroup/memory.stat").write_text(f"anon {50 * MIB}\ninactive_file {100 * MIB}\nactive_file 7\n")
    assert available_host_bytes(host) == 350 * MIB


def test_a_group_without_a_limit_or_with_more_than_the_host_has_limits_nothing(tmp_path):
    host = a_host(tmp_path, "0::/\n", **in_group(memory_max="max\n", memory_current="5\n"))
    assert available_host_bytes(host) == 1000 * MIB
    (host / "sys/fs/cgroup/memory.max").write_text(f"{2**62}")
    assert available_host_bytes(host) == 1000 * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    assert available_host_bytes(a_host(tmp_path, "0::/\n", **in_group(memory_max="10", memory_current="11"))) == 0


def test_the_tightest_of_the_groups_above_a_process_counts(tmp_path):
    levels = {"slice": (500, 100), "slice__job": (900, 50), "slice__job__task": (800, 20)}
    files = {
        f"{place}__memory.{name}": str(num * MIB)
        for place, numbers in levels.items()
        for name, num in zip(("max", "current"), numbers, strict=True)
    }
    assert available_host_bytes(a_host(tmp_path, "0::/slice/job/task\n", **files)) == 400 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../.."])
def test_groups_of_version_1_count_also_where_the_path_is_that_of_the_host(tmp_path, path):
    host = a_host(
        tmp_path, f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n",
        **{
            "memory__memory.limit_in_bytes": f"{300 * MIB}\n",
            "memory__memory.usage_in_bytes": f"{120 * MIB}\n",
            "memory__memory.stat": f"inactive_file 5\ntotal_inactive_file {20 * MIB}\n",
        },
    )  # fmt: skip
    assert available_host_bytes(host) == 200 * MIB


def test_version_1_without_a_limit_has_a_huge_number(tmp_path):
    files = {"memory__memory.limit_in_bytes": "9223372036854771712", "memory__memory.usage_in_bytes": "1"}
    assert available_host_bytes(a_host(tmp_path, "4:memory:/\n", **files)) == 1000 * MIB


def test_a_system_without_such_files_gives_a_number(tmp_path):
    available = available_host_bytes(tmp_path)
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_pool_of_automatic_size_takes_its_share_of_it(monkeypatch):
    monkeypatch.setattr(tensors, "available_host_bytes", lambda: 1000 * MIB)
    assert tensors.usable_bytes(torch.device("cpu")) == 250 * MIB
    assert available_host_bytes() > 0  # of this machine
