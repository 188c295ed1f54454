"""Tests of the division of a product's pieces among threads: each is computed once, also where one thread is late."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

from lockstep.kernels.machine import native

SOURCE = """
#include <omp.h>
#include "linear/linear_shares.h"

// Returns how many shares have pieces.
extern "C" int64_t num_filled(int64_t pieces, int64_t threads, int64_t align) {
  Shares shares(pieces, (int)threads, align, 2);
  int64_t filled = 0, piece;
  for (int i = 0; i < threads; i++) filled += shares.take(i, [](int64_t) { return (int64_t)1; }, &piece);
  return filled;
}

// Counts how often each piece was taken. is_late: thread 0 begins when the others are done; returns what it had left.
extern "C" int64_t take_all(int64_t pieces, int64_t threads, int64_t align, int64_t owners, int64_t is_late,
                            int64_t* taken) {
  Shares shares(pieces, (int)threads, align, owners);
  std::atomic<int64_t> done{0};
  int64_t left = 0;
#pragma omp parallel num_threads((int)threads)
  {
    const int own = omp_get_thread_num();
    int64_t piece, num;
    while (is_late && own == 0 && done < omp_get_num_threads() - 1) {
    }
    while ((num = shares.take(own, [](int64_t) { return (int64_t)2; }, &piece)))
      for (int64_t i = piece; i < piece + num; i++) {
#pragma omp atomic
        taken[i]++;
        if (own == 0) left++;
      }
    while (shares.take_last(&piece)) {
#pragma omp atomic
      taken[piece]++;
    }
    done++;
  }
  return left;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> native.NativeLibrary:
    folder: Path = tmp_path_factory.mktemp("shares")
    (folder / "shares.cpp").write_text(SOURCE)
    try:
        return native.build(folder / "shares.cpp", {**os.environ, "LOCKSTEP_CACHE_DIR": str(folder / "cache")})
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def take_all(library: native.NativeLibrary):
    return library.function("take_all", [*[ctypes.c_int64] * 5, ctypes.c_void_p], ctypes.c_int64)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_pieces", [0, 1, 2, 3, 7, 100, 10_000])
@pytest.mark.parametrize(("align", "owners"), [(1, 2), (2, 2), (2, 0)])
def test_every_piece_is_taken_once(take_all, num_pieces: int, num_threads: int, align: int, owners: int) -> None:
    for is_late in (False, True):
        taken = torch.zeros(num_pieces, dtype=torch.int64)
        take_all(num_pieces, num_threads, align, owners, is_late, taken.data_ptr())
        assert taken.tolist() == [1] * num_pieces, is_late


@pytest.mark.parametrize("owners", [0, 2])
def test_a_thread_that_is_late_is_left_with_as_many_pieces_as_owners_are(take_all, owners: int) -> None:
    taken = torch.zeros(1000, dtype=torch.int64)
    assert take_all(1000, 2, 1, owners, True, taken.data_ptr()) == owners


@pytest.mark.parametrize(("num_pieces", "num_threads", "expected"), [(48, 2, 2), (48, 32, 32), (48, 64, 48), (8, 2, 2)])
def test_as_many_threads_as_possible_get_pieces(
    library: native.NativeLibrary, num_pieces: int, num_threads: int, expected: int
) -> None:
    num_filled = library.function("num_filled", [ctypes.c_int64] * 3, ctypes.c_int64)
    assert num_filled(num_pieces, num_threads, 2) == expected
