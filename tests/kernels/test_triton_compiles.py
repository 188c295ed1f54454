"""Tests of the Triton kernels as compiled for a Hopper GPU (none is needed): properties that no interpreter shows.

A row's bits cannot depend on its batch if one binary serves all batches and places, so the tests count binaries.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

import lockstep
from lockstep.tests.support.triton.gpu_compilation import LAUNCHES

MAX_STACK = 64  # bytes per thread for spilled registers
BY_PARTS = ("digests, 4 bytes side by side", "digests, single bytes")  # compile longer than all others together
IMAGES_WIDE = "attention of images, float32"  # of the parts of "attention, float32" and "attention of images, bfloat16"
# Kernels that sum in the order of their lanes. In all others an element depends on one element of a row and on results
# of these, or its sums have an order of their own: the product and attention, whose matrix instructions add. These have
# a binary for each tile and kind of step; they add alike, as other tests and the self-test say.
SUMMING = {
    "attention.triton_kernels": {"_merge_kernel"},
    "attention.triton_selection": {"_score_kernel"},
    "sampling.triton_scan": {"_scan_kernel"},
    "layers.triton_head_norms": {"_head_kernel"},
    "layers.triton_rms_norm": {"_forward_kernel"},
    "recurrent.triton_kernels": {"_conv_kernel", "_delta_kernel"},
    "sampling.triton_draws": {"_choose_kernel"},
}
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Binary:
    """A kernel as compiled for one of `gpu_compilation.LAUNCHES`."""

    launch: str
    module: str
    kernel: str
    ptx: str
    cubin: Path


def compile_for_hopper(folder: Path, launches: list[str]) -> list[Binary]:
    try:
        _ = triton.knobs.nvidia.ptxas.path
    except RuntimeError as error:
        pytest.skip(f"nothing compiles for a GPU: {error}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.tests.support.triton.gpu_compilation", str(folder), *launches],
        env={**environment, "TRITON_CACHE_DIR": str(folder / "cache")}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    binaries = []
    for line in done.stdout.splitlines():
        names = json.loads(line)
        code = folder / names.pop("binary")
        binaries.append(Binary(**names, ptx=code.with_suffix(".ptx").read_text(), cubin=code.with_suffix(".cubin")))
    return binaries


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> list[Binary]:
    """Compile all launches but those of the exhaustive tests."""
    chosen = [name for name in LAUNCHES if name not in (*BY_PARTS, IMAGES_WIDE)]
    return compile_for_hopper(tmp_path_factory.mktemp("binaries"), chosen)


def test_every_kernel_compiles(binaries: list[Binary]) -> None:
    found = (Path(lockstep.__file__).parent / "kernels").glob("*/triton_*.py")
    names = [f"{path.parent.name}.{path.stem}" for path in found]
    modules = {name: importlib.import_module(f"lockstep.kernels.{name}") for name in names}
    expected = {(m, kernel) for m, module in modules.items() for kernel in vars(module) if kernel.endswith("_kernel")}
    assert len(expected) >= 11
    assert {(binary.module, binary.kernel) for binary in binaries} == expected


def test_one_binary_serves_rows_in_any_number_and_place(binaries: list[Binary]) -> None:
    counts = defaultdict(int)
    for binary in binaries:
        counts[binary.launch, binary.module, binary.kernel] += binary.kernel in SUMMING.get(binary.module, ())
    found = {(module, kernel) for (_, module, kernel), count in counts.items() if count}
    assert found == {(module, kernel) for module, kernels in SUMMING.items() for kernel in kernels}
    assert {key: count for key, count in counts.items() if count > 1} == {}


def test_float32_is_multiplied_as_float32(binaries: list[Binary]) -> None:
    multiplying = {"_linear_kernel", "_grouped_kernel", "_attend_kernel"}
    wide = [b for b in binaries if b.launch.endswith("float32") and b.kernel in multiplying]
    assert {b.kernel for b in wide} == multiplying
    assert_multiplied_as_float32(binaries, wide)


def test_tensor_cores_multiply_halves_and_all_tiles_of_the_product_add_alike(binaries: list[Binary]) -> None:
    products = [b for b in binaries if b.kernel in ("_linear_kernel", "_grouped_kernel") and "float16" in b.launch]
    widths = set()
    for binary in products:
        forms = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.(\S+)", binary.ptx)
        of = "f32.bf16.bf16" if "bfloat16" in binary.launch else "f32.f16.f16"
        assert {(rows, depth, types) for rows, _, depth, types in forms} == {("64", "16", of)}, binary.launch
        assert "cp.async.cg.shared.global" in binary.ptx, binary.launch  # 16 bytes at a time
        assert "cp.async.ca" not in binary.ptx, binary.launch
        widths |= {int(columns) for _, columns, _, _ in forms}
    assert widths >= {16, 32, 64}
    attending = [b for b in binaries if b.kernel == "_attend_kernel" and "bfloat16" in b.launch]
    assert {binary.launch for binary in attending} >= {"attention, bfloat16", "prompts, bfloat16"}
    for binary in attending:
        assert "f32.bf16.bf16" in binary.ptx and "mma" in binary.ptx, binary.launch
        assert ("wgmma" in binary.ptx) == binary.launch.startswith("prompts"), binary.launch
    backward = [b for b in binaries if b.module == "attention.triton_gradients" and "bfloat16" in b.launch]
    assert {b.kernel for b in backward if "wgmma" in b.ptx} == {"_query_kernel", "_key_kernel"}
    assert [b.launch for b in backward if re.search(r"(?<!wg)mma\.sync", b.ptx)] == []


def test_attention_rounds_alike_in_all_its_binaries(binaries: list[Binary]) -> None:
    """The compiler may fuse a product and a sum only if they have no rounding of their own (.rn)."""
    found = [b for b in binaries if b.module == "attention.triton_kernels"]
    assert len({b.ptx for b in found if b.kernel == "_attend_kernel"}) >= 8
    assert_rounded_alike(found)


def test_draws_fuse_no_product_and_sum(binaries: list[Binary]) -> None:
    """Their definition rounds each operation: a fused one has other bits.

    The library's logarithm, for log-probabilities, has fused operations of its own, which flush subnormal numbers.
    """
    defined = {"_scan_kernel", "_choose_kernel", "_weights_kernel", "_noise_kernel"}
    found = [b for b in binaries if b.kernel in defined]
    assert {b.kernel for b in found} == defined
    assert [b.launch for b in found if re.search(r"\bfma\.(?!rn\.ftz\.f32)", b.ptx)] == []
    assert [b.launch for b in found if b.kernel not in ("_scan_kernel", "_choose_kernel") and "fma." in b.ptx] == []


def test_hardly_a_register_is_spilled(binaries: list[Binary]) -> None:
    assert_few_spills(binaries)


@pytest.mark.exhaustive
def test_attention_of_images_in_float32_is_as_that_of_text(tmp_path: Path) -> None:
    binaries = compile_for_hopper(tmp_path, [IMAGES_WIDE])
    attending = [b for b in binaries if b.kernel == "_attend_kernel"]
    assert len(attending) >= 3
    assert_multiplied_as_float32(binaries, attending)
    assert_rounded_alike(attending)
    assert_few_spills(binaries)


@pytest.mark.exhaustive
def test_hashing_of_scattered_bytes_compiles_without_spills(tmp_path: Path) -> None:
    binaries = compile_for_hopper(tmp_path, list(BY_PARTS))
    assert [binary.kernel for binary in binaries] == ["_hash_kernel"] * 2
    assert_few_spills(binaries)


# Threads of a program and the least number of programs that a processor holds at a time, by registers. Decode attention
# holds two tiles of keys and values in flight: with the registers of three programs it spills (112 bytes at 168).
OCCUPANCY = {
    ("linear, few rows, bfloat16", "_linear_kernel"): (128, 8),
    ("joined, few rows, bfloat16", "_linear_kernel"): (128, 4),
    ("attention, bfloat16", "_attend_kernel"): (128, 2), ("norms, bfloat16", "_forward_kernel"): (256, 3),
    ("rotations, bfloat16", "_rotary_kernel"): (128, 8), ("draws, bfloat16", "_scan_kernel"): (256, 4),
}  # fmt: skip


def test_processors_hold_as_many_programs_as_the_kernels_count_on(binaries: list[Binary]) -> None:
    found = {}
    for binary in binaries:
        if (key := (binary.launch, binary.kernel)) in OCCUPANCY:
            threads = OCCUPANCY[key][0]
            registers = -(-registers_of(binary) // 8) * 8  # given out by eight
            found[key] = min(found.get(key, 32), 65_536 // (registers * threads))
    assert found.keys() == OCCUPANCY.keys()
    assert {key: count for key, count in found.items() if count < OCCUPANCY[key][1]} == {}


def registers_of(binary: Binary) -> int:
    return int(re.findall(r"REG:(\d+)", usage_of(binary))[0])


def usage_of(binary: Binary) -> str:
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as error:
        pytest.skip(f"nothing tells a binary's registers: {error}")
    command = [tool, "-res-usage", str(binary.cubin)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def assert_multiplied_as_float32(binaries: list[Binary], multiplying: list[Binary]) -> None:
    assert [(b.launch, b.kernel) for b in binaries if "tf32" in b.ptx] == []
    for binary in multiplying:
        assert "mma" not in binary.ptx and binary.ptx.count("fma.rn.f32") >= 100, binary.launch


def assert_rounded_alike(binaries: list[Binary]) -> None:
    assert [b.launch for b in binaries if re.search(r"\b(add|sub|mul)\.(ftz\.)?f32\b", b.ptx)] == []


def assert_few_spills(binaries: list[Binary]) -> None:
    for binary in binaries:
        usage = usage_of(binary)
        assert sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))) <= MAX_STACK, (binary.launch, usage)
        assert "STACK:" in usage, usage
