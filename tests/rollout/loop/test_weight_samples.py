"""Samples of weights: the same for the same bytes, of every layout and type, and other ones after a write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.rollout.loop.weight_samples import NUM_ELEMENTS, weight_samples

F32 = torch.float32


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (64, 96), (4, 16, 24)])
def test_equal_bytes_have_equal_samples_and_a_write_to_all_elements_changes_them(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    before = weight_samples([("weight", tensor)])
    assert before == weight_samples([("weight", tensor.clone())])
    assert len(before["weight"]) == min(tensor.numel(), NUM_ELEMENTS) * tensor.element_size()
    tensor.data.copy_(torch.ones(shape, dtype=F32))
    assert weight_samples([("weight", tensor)])["weight"] != before["weight"]


def test_the_elements_of_a_matrix_lie_in_different_rows_and_columns() -> None:
    matrix = torch.arange(1024 * 768, dtype=torch.int32).view(1024, 768)
    found = torch.frombuffer(bytearray(weight_samples([("matrix", matrix)])["matrix"]), dtype=torch.int32)
    for each in (found // 768, found % 768):
        assert len(each.unique()) == NUM_ELEMENTS


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, 4:36], lambda t: t[1::2], lambda t: t[:0]])
def test_views_are_read_within_their_own_elements(view) -> None:
    whole = torch.arange(64 * 48, dtype=torch.int32).view(64, 48)
    own = set(view(whole).flatten().tolist())
    sample = weight_samples([("view", view(whole))])["view"]
    read = torch.frombuffer(bytearray(sample), dtype=torch.int32).tolist() if sample else []
    assert set(read) <= own and len(read) == min(len(own), NUM_ELEMENTS)


def test_tensors_without_memory_or_of_other_sizes_have_none() -> None:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    wide = torch.ones(3, dtype=torch.complex128)
    tensors: dict[str, Tensor] = {"freed": freed, "meta": torch.ones(3, device="meta"), "wide": wide}
    tensors["weight"] = torch.ones(2, dtype=F32)
    assert weight_samples(tensors.items()) == {
        "freed": b"", "meta": b"", "wide": b"", "weight": torch.ones(2, dtype=F32).numpy().tobytes(),
    }  # fmt: skip


def test_nan_is_equal_to_itself() -> None:
    tensor = torch.full((4,), float("nan"), dtype=F32)
    assert weight_samples([("weight", tensor)]) == weight_samples([("weight", tensor)])
