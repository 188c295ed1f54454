"""Work in threads whose results are used in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int
) -> Iterator[_Result]:
    """Map in threads and yield the results in order. At most `num_threads` + 1 results are computed ahead of the
    consumer."""
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
