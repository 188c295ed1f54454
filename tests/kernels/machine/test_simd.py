"""Tests of the vectors that native kernels compute with: rounding to bfloat16, for every class of float and both sides
of every tie."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from lockstep.kernels.machine import native

SOURCE = """
#include "machine/simd.h"
using namespace simd;
extern "C" void round_all(const float* from, bf16* to, float* kept, int64_t count) {
  for (int64_t i = 0; i < count; i += W) store(to + i, load(from + i)), store(kept + i, to_bf16(load(from + i)));
}
"""


@pytest.mark.parametrize("level", native.ISA_LEVELS)
def test_floats_round_to_bfloat16_as_in_pytorch_on_every_level(level: str, tmp_path: Path) -> None:
    source = tmp_path / "rounding.cpp"
    source.write_text(SOURCE)
    environment = {**os.environ, "LOCKSTEP_CACHE_DIR": str(tmp_path / "cache"), "LOCKSTEP_MAX_ISA": level}
    try:
        library = native.build(source, environment)
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))
    pointers = [ctypes.c_void_p] * 3
    round_all = library.function("round_all", [*pointers, ctypes.c_int64], None)

    high = torch.arange(1 << 16) << 16  # every sign, exponent and mantissa of bfloat16, subnormals and NaN among them
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    floats = (high[:, None] + low).flatten().to(torch.int32).view(torch.float32)
    found, kept = torch.empty(len(floats), dtype=torch.bfloat16), torch.empty(len(floats))
    round_all(floats.data_ptr(), found.data_ptr(), kept.data_ptr(), len(floats))

    expected = floats.bfloat16()
    is_nan = expected.isnan()
    assert torch.equal(found.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])
    assert found.view(torch.int16)[is_nan].unique().tolist() == [0x7FC0]
    assert torch.equal(kept.view(torch.int32), found.float().view(torch.int32))
