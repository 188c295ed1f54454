"""Tensors in memory pages of 2 MiB, on Linux.

A step reads all weights and KV once; with pages of 4 KiB, looking up their addresses takes up to a sixth of the time.
Values and addresses do not change, so a trainer's own tensors may be passed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor

from .switches import is_on

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h
# A kernel without huge pages or older than 6.1, memory that maps a file, and no free stretch of memory.
_REFUSALS = {errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY}


def use_huge_pages(tensors: Iterable[Tensor], *, now: bool) -> int:
    """Ask Linux for huge pages under these tensors, and return the bytes of the stretches for which it agreed.

    now: move the present contents too (about 1 GB a second); otherwise a page is huge from its first use on. Tensors
    that are not on a CPU are skipped, and so are all tensors on other systems; `LOCKSTEP_HUGE_PAGES=0` switches it off.
    Raises OSError where Linux refuses for another reason than a lack of huge pages.
    """
    if sys.platform != "linux" or not is_on("LOCKSTEP_HUGE_PAGES"):
        return 0
    num_bytes = 0
    for start, stop in stretches((t.data_ptr(), t.nbytes) for t in tensors if t.device.type == "cpu"):
        agreed = _advise(start, stop, _MADV_HUGEPAGE)  # fails at holes, after advising the rest
        if now:
            agreed = _advise(start, stop, _MADV_COLLAPSE)
        num_bytes += (stop - start) * agreed
    logger.debug("huge pages asked for: %d bytes", num_bytes)
    return num_bytes


def stretches(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Find the stretches [start, stop) of whole huge pages that tensors, given as (address, bytes), lie in.

    Stretches that meet are merged. A stretch is left out where tensors fill less than half of it, so that small tensors
    move no memory of others.
    """
    found: list[tuple[int, int, int]] = []  # start, stop, bytes of tensors in it
    for address, num_bytes in sorted(memory):
        start = address // PAGE_BYTES * PAGE_BYTES
        stop = -(-(address + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        if found and start <= found[-1][1]:
            first, last, filled = found.pop()
            found.append((first, max(last, stop), filled + num_bytes))
        else:
            found.append((start, stop, num_bytes))
    return [(start, stop) for start, stop, filled in found if 2 * filled >= stop - start]


def _advise(start: int, stop: int, advice: int) -> bool:
    if _madvise()(start, stop - start, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _REFUSALS:
        raise OSError(code, f"madvise({advice}) of {stop - start} bytes: {os.strerror(code)}")
    return False


@cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
