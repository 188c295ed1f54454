"""Tests of the Triton hash kernel, interpreted without a GPU: each tile has hashlib's digest."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lockstep.kernels.sha256.tiles import tile_hashes_of_all, tile_hashes_reference
from lockstep.kernels.sha256.triton_kernels import _unit, triton_tile_hashes
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_leaves, tile_grid

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")


def random_block(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).to(DEVICE)


# [k, r, m, c], dtype, rows of a strip, columns of a piece, and the bytes that lie side by side
CASES: list[tuple[tuple[int, ...], torch.dtype, int, int, int]] = [
    ((1, 3, 2, 16), torch.float32, 2, 16, 64),  # the last strip is shorter
    ((2, 2, 1, 32), torch.bfloat16, 1, 32, 64),
    ((2, 3, 2, 5), torch.float32, 2, 5, 4),
    ((1, 1, 3, 21), torch.int32, 1, 8, 4),  # the last piece of a row is shorter
    ((1, 3, 2, 7), torch.uint8, 2, 7, 1),
    ((1, 2, 1, 33), torch.bfloat16, 1, 10, 1),
    ((1, 1, 1, 1), torch.float8_e4m3fn, 1, 1, 1),
    ((1, 2, 1, 2), torch.complex64, 2, 2, 4),
]


QUICK_CASES = [
    ((1, 3, 2, 8), torch.float64, 1, 8, 64),
    ((1, 3, 2, 5), torch.float32, 2, 5, 4),
    ((1, 1, 3, 11), torch.bfloat16, 1, 4, 1),
]


@pytest.mark.parametrize("cases", [QUICK_CASES, pytest.param(CASES, marks=pytest.mark.slow)])
def test_blocks_of_many_shapes_hashed_together_have_hashlibs_digests(cases: list[Any]) -> None:
    blocks: list[Any] = [(random_block(shape, dtype, i), *cut) for i, (shape, dtype, *cut, _) in enumerate(cases)]
    assert [_unit(*block) for block in blocks] == [unit for *_, unit in cases]
    blocks.append((torch.empty(0, 3, 2, 4, device=DEVICE), 1, 4))
    assert triton_tile_hashes(blocks) == [tile_hashes_reference(*block) for block in blocks]
    assert triton_tile_hashes([]) == []


@pytest.mark.slow
def test_views_of_any_strides_have_the_digests_of_their_values() -> None:
    whole = random_block((6, 4, 32), torch.float32)
    whole_bytes = random_block((40,), torch.uint8)
    views = {
        "cells of a matrix": whole[0].view(1, 4, 2, 16),
        "every other row": whole[:, 0].view(1, 6, 2, 16)[:, ::2],
        "transposed": whole[:, :, 0].t()[None, :, None],
        "expanded": whole[0, 0, :16].expand(1, 2, 1, 16),
        "conjugate": torch.view_as_complex(whole[:2, :1, :8].reshape(2, 4, 2)).conj()[None, :, None],
        "from an odd address": whole_bytes[1:33].view(1, 2, 1, 16),
    }
    blocks = [(view, view.shape[1], view.shape[3]) for view in views.values()]
    for name, found, block in zip(views, triton_tile_hashes(blocks), blocks, strict=True):
        assert found == tile_hashes_reference(*block), name


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1, 4])
def test_every_message_length_is_padded_as_sha256_demands(unit: int) -> None:
    lengths = range(unit, 140, unit)
    raw = random_block((140,), torch.uint8)
    blocks = [(raw[:n].view(1, 1, 1, n).view(torch.int32 if unit == 4 else torch.uint8), 1, n) for n in lengths]
    chosen = (
        blocks if HAS_GPU else [b for b, n in zip(blocks, lengths, strict=True) if n % 64 in (1, 4, 52, 55, 56, 60)]
    )
    for found, (block, *_) in zip(triton_tile_hashes(chosen), chosen, strict=True):
        assert found == hashlib.sha256(block.cpu().view(torch.uint8).numpy().tobytes()).digest()


@pytest.mark.slow
def test_more_tiles_than_a_program_takes_keep_their_order() -> None:
    block = random_block((3, 4, 16, 3), torch.int16)
    [found] = triton_tile_hashes([(block, 1, 3)])
    assert len(found) == 3 * 4 * 16 * 32
    assert found == tile_hashes_reference(block, 1, 3)


def test_blocks_on_a_cpu_are_hashed_one_by_one_to_the_same_digests() -> None:
    blocks: list[Any] = [(random_block(shape, dtype).cpu(), *cut) for shape, dtype, *cut, _ in CASES]
    assert tile_hashes_of_all(blocks) == [tile_hashes_reference(*block) for block in blocks]


@pytest.mark.slow
def test_leaves_of_a_tensors_own_grid_are_hashlibs() -> None:
    for shape, dtype in (((64, 48), torch.bfloat16), ((2, 32, 16), torch.float32), ((100,), torch.float16)):
        tensor = random_block(shape, dtype)
        grid = tile_grid(shape)
        block = tensor.view(grid.leading * grid.cell_rows, grid.rows, grid.cell_cols, grid.cols)
        [found] = triton_tile_hashes([(block, grid.strip_rows, grid.piece_cols)])
        assert [found[i : i + 32] for i in range(0, len(found), 32)] == tensor_leaves(tensor.cpu())


@gpu
@pytest.mark.gpu
def test_a_model_on_a_gpu_has_the_digest_of_its_copy_on_the_host() -> None:
    shapes = [(4096, 4096), (1024, 4096), (4096,), (50, 33_000), (3, 128, 514), (7,), (), (0, 4), (16, 600_000)]
    tensors = [
        (f"{shape} {dtype}", random_block(shape or (1,), dtype).reshape(shape))
        for shape, dtype in itertools.product(shapes, (torch.bfloat16, torch.float32, torch.uint8))
    ]
    tensors.append(("transposed", tensors[0][1].t()))
    on_host = [(name, tensor.cpu()) for name, tensor in tensors]
    for (name, tensor), (_, copy) in zip(tensors, on_host, strict=True):
        assert tensor_leaves(tensor) == tensor_leaves(copy), name
    assert model_digest(tensors) == model_digest(on_host)
