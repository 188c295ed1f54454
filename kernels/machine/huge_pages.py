"""Memory in pages of 2 MiB where Linux gives them: a step reads all weights and KV once, and with pages of 4 KiB it
spends up to a sixth of the time in looking up where they lie. What the memory holds, and
where it is, stays as it is, so a trainer's own tensors may be given.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
from collections.abc import Iterable
from functools import cache

from torch import Tensor

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h
# A kernel without huge pages or older than 6.1, memory that is a file's, and no free stretch of memory.
_REFUSALS = {errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EBUSY}


def use_huge_pages(tensors: Iterable[Tensor], *, now: bool) -> int:
    """Ask for huge pages under these tensors; returns the bytes of the stretches for which Linux agreed.

    now: move what lies there already, about 1 GB a second; otherwise pages are huge as they are first touched. Those of
    devices, and any below Linux, are passed over; `LOCKSTEP_HUGE_PAGES=0` switches it off. Raises OSError for what
    Linux refuses for another reason than that it has none to give.
    """
    if sys.platform != "linux" or os.environ.get("LOCKSTEP_HUGE_PAGES") == "0":
        return 0
    num_bytes = 0
    for start, stop in stretches((t.data_ptr(), t.nbytes) for t in tensors if t.device.type == "cpu"):
        agreed = _advise(start, stop, _MADV_HUGEPAGE)  # not where there are holes in the stretch, but beside them
        if now:
            agreed = _advise(start, stop, _MADV_COLLAPSE)
        num_bytes += (stop - start) * agreed
    logger.debug("huge pages asked for: %d bytes", num_bytes)
    return num_bytes


def stretches(memory: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) of tensors -> the whole huge pages [start, stop) that they touch, merged where they meet; only
    stretches that the tensors fill by half at least, so that small ones move nothing else."""
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
def _madvise() -> ctypes._CFuncPtr:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
