"""Tests of huge pages: values and addresses stay, small tensors are left alone, and Linux may refuse."""

from __future__ import annotations

import sys

import pytest
import torch

from lockstep.kernels.machine.huge_pages import PAGE_BYTES, stretches, use_huge_pages


def test_stretches_are_whole_pages_merged_where_they_meet_and_mostly_the_tensors():
    page = PAGE_BYTES
    assert stretches([]) == []
    assert stretches([(10 * page + 16, page)]) == [(10 * page, 12 * page)]
    assert stretches([(10 * page, 100)]) == []  # it would move memory of others
    assert stretches([(12 * page, 2 * page), (10 * page, 2 * page)]) == [(10 * page, 14 * page)]
    assert stretches([(10 * page, page), (13 * page, page)]) == [(10 * page, 11 * page), (13 * page, 14 * page)]
    halves = [(10 * page + start, page // 4) for start in range(0, 4 * page, page // 2)]
    assert stretches(halves) == [(10 * page, 14 * page)]


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
@pytest.mark.parametrize("now", [True, False])
def test_values_and_addresses_stay(now):
    tensors = [torch.arange(3 * PAGE_BYTES // 8 + n) for n in range(5)] + [torch.ones(3)]
    copies, addresses = [t.clone() for t in tensors], [t.data_ptr() for t in tensors]
    agreed = use_huge_pages(tensors, now=now)
    assert 0 <= agreed <= sum(t.nbytes for t in tensors) + len(tensors) * 2 * PAGE_BYTES
    assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
    assert [t.data_ptr() for t in tensors] == addresses


def test_nothing_is_asked_for_where_it_is_switched_off_or_memory_is_a_devices(monkeypatch):
    assert use_huge_pages([torch.empty(1 << 24, device="meta")], now=True) == 0
    monkeypatch.setenv("LOCKSTEP_HUGE_PAGES", "0")
    assert use_huge_pages([torch.ones(1 << 24)], now=True) == 0
