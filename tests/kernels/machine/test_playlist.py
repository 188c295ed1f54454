"""Tests of playlists: functions of any arguments get theirs, in order, and nothing is called after one that fails."""

import ctypes
import os
import threading
from pathlib import Path

import pytest

from lockstep.kernels.machine import native
from lockstep.kernels.machine.playlist import SOURCE, Playlist, can_play

KERNELS = """
#include "machine/packed.h"

struct Pair {
  int64_t first, second;
};

extern "C" void note(const Pair* pair, float factor, int64_t is_negative, float more, const int64_t* maybe,
                     int64_t* to) {
  const double value = (double)(pair->first * 10 + pair->second) * factor + more + (maybe ? *maybe : 0);
  to[1 + to[0]++] = (int64_t)(is_negative ? -value : value);
}
extern "C" int64_t fail(int64_t code) { return code; }
extern "C" int64_t wait_for(const volatile int64_t* flag) {
  while (!*flag) {
  }
  return 0;
}
extern "C" void unpacked(int64_t* to) { *to = 1; }

LOCKSTEP_PACKED(note)
LOCKSTEP_PACKED(fail)
LOCKSTEP_PACKED(wait_for)
"""

pytestmark = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_int64))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> native.NativeLibrary:
    folder: Path = tmp_path_factory.mktemp("playlist")
    (folder / "kernels.cpp").write_text(KERNELS)
    return native.build(folder / "kernels.cpp", {**os.environ, "LOCKSTEP_CACHE_DIR": str(folder / "cache")})


def note_of(library: native.NativeLibrary):
    kinds = [ctypes.c_void_p, ctypes.c_float, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p]
    return library.function("note", kinds, None)


def test_each_call_gets_its_arguments_and_they_are_made_in_order(library: native.NativeLibrary) -> None:
    note, notes, seven = note_of(library), (ctypes.c_int64 * 8)(), ctypes.c_int64(7)
    pair, array, fail = (
        Pair(1, 2),
        (ctypes.c_int64 * 2)(3, 4),
        library.function("fail", [ctypes.c_int64], ctypes.c_int64),
    )
    calls = [
        (note, (ctypes.addressof(pair), 0.5, False, -2.0, None, ctypes.addressof(notes))),
        (fail, (0,)),
        (note, (array, 2.0, True, 0.0, ctypes.addressof(seven), notes)),
    ]
    play = Playlist(calls)
    assert play() == 0 and list(notes) == [2, 4, -75, 0, 0, 0, 0, 0]
    pair.second = 6  # memory is read when it is played
    assert play() == 0 and list(notes)[:5] == [4, 4, -75, 6, -75]


def test_nothing_is_called_after_one_that_fails(library: native.NativeLibrary) -> None:
    note, notes, pair = note_of(library), (ctypes.c_int64 * 8)(), Pair(0, 5)
    call = (note, (pair, 1.0, 0, 0.0, None, notes))
    fail = library.function("fail", [ctypes.c_int64], ctypes.c_int64)
    assert Playlist([call, (fail, (-3,)), call])() == 2
    assert list(notes)[:3] == [1, 5, 0]


def test_other_threads_run_python_while_it_is_played(library: native.NativeLibrary) -> None:
    flag = ctypes.c_int64(0)
    wait = library.function("wait_for", [ctypes.c_void_p], ctypes.c_int64)
    play = Playlist([(wait, (ctypes.addressof(flag),))] * 2)
    player = threading.Thread(target=play)
    player.start()
    flag.value = 1  # is reached only if the player does not hold the lock
    player.join(60)
    assert not player.is_alive()


def test_only_functions_with_a_packed_variant_can_be_played(library: native.NativeLibrary) -> None:
    assert can_play(note_of(library))
    assert not can_play(library.function("unpacked", [ctypes.c_void_p], None))
    assert not can_play(print)
