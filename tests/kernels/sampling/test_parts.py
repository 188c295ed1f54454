"""Draws from rows whose vocabulary is cut over ranks, which are threads here: the bits of a draw from whole rows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lockstep.kernels.sampling.draws import KEEP_ALL, RowSettings, draw_tokens
from lockstep.kernels.sampling.parts import DrawnRows, draw_parts, keeps_all, serves_parts


def some_settings(num_rows: int, **changes: Tensor) -> RowSettings:
    columns = {
        "temperatures": torch.linspace(0.3, 2.0, num_rows), "seeds": torch.arange(num_rows),
        "top_k": torch.full((num_rows,), KEEP_ALL), "top_p": torch.ones(num_rows, dtype=torch.float64),
        "min_p": torch.zeros(num_rows),
    }  # fmt: skip
    return RowSettings(**{**columns, **changes})


def drawn_in_parts(logits: Tensor, settings: RowSettings, positions: Tensor, num_parts: int) -> list[DrawnRows]:
    """Draw on one thread per part."""
    met, size = threading.Barrier(num_parts, timeout=30), logits.shape[1] // num_parts
    given: list[Tensor | None] = [None] * num_parts

    def rank(index: int) -> DrawnRows:
        def gather(mine: Tensor) -> Tensor:
            given[index] = mine.clone()
            met.wait()
            found = torch.stack([tensor for tensor in given if tensor is not None])
            met.wait()
            return found

        part = logits[:, index * size : (index + 1) * size]
        return draw_parts(part, settings, positions, index * size, gather)

    with ThreadPoolExecutor(num_parts) as pool:
        return list(pool.map(rank, range(num_parts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("shape", ["plain", "ties", "one part", "huge", "flat"])
def test_parts_draw_the_tokens_and_report_the_bits_of_whole_rows(shape, num_parts, dtype):
    num_rows, vocab_size = 60, 4096
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_parts)) * 3
    if shape == "ties":
        logits = logits.round()
    elif shape == "one part":  # all other ranks have nothing to draw
        logits[::2, vocab_size // num_parts :] = -torch.inf
        logits[1::2, : -vocab_size // num_parts] = -torch.inf
    elif shape == "huge":
        logits = logits * 1e30
    elif shape == "flat":
        logits = logits * 0
    logits = logits.to(dtype)
    top_k = torch.full((num_rows,), KEEP_ALL).index_fill(0, torch.arange(0, num_rows, 7), 1)
    settings, positions = some_settings(num_rows, top_k=top_k), torch.arange(num_rows) * 3
    whole = draw_tokens(logits, settings, positions)
    for drawn in drawn_in_parts(logits, settings, positions, num_parts):
        assert torch.equal(drawn.token_ids, whole.token_ids)
        assert torch.equal(drawn.logprobs, whole.logprobs)


def test_a_broken_part_breaks_its_row_on_every_rank_and_no_other():
    logits = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    settings, positions = some_settings(4), torch.arange(4)
    whole = draw_tokens(logits, settings, positions)
    logits[1, 3], logits[2, 1000] = torch.nan, torch.inf
    for drawn in drawn_in_parts(logits, settings, positions, 2):
        assert drawn.logprobs.isnan().tolist() == [False, True, True, False]
        assert torch.equal(drawn.token_ids[::3], whole.token_ids[::3]) and drawn.token_ids[1:3].tolist() == [0, 0]


def test_only_parts_on_the_grid_of_blocks_are_served():
    cpu = torch.device("cpu")
    assert serves_parts(512, torch.bfloat16, cpu) and not serves_parts(384, torch.bfloat16, cpu)
    assert not serves_parts(512, torch.float64, cpu)


def test_a_filter_needs_whole_rows_unless_it_takes_the_most_likely_token():
    top_k = torch.tensor([KEEP_ALL, 1])
    assert keeps_all(some_settings(2)) and keeps_all(some_settings(2, top_k=top_k))
    assert keeps_all(some_settings(2, top_k=top_k, min_p=torch.tensor([0.0, 0.5])))
    assert not keeps_all(some_settings(2, top_k=torch.tensor([KEEP_ALL, 5])))
    assert not keeps_all(some_settings(2, min_p=torch.tensor([0.5, 0.0])))
    assert not keeps_all(some_settings(2, top_p=torch.tensor([0.9, 1.0], dtype=torch.float64)))
