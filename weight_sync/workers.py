"""Threads that work for a generator.

Python's garbage collector closes a generator that its caller forgot, wherever it happens to run: at any allocation, in
any thread, under any lock. To join a thread there can wait for ever: in CPython 3.11 `Thread.join` takes a lock under
which `threading` itself allocates, in each thread that starts. So nothing here is joined.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """A pool of threads as a context: at its end, work that has begun is waited for, other work is dropped, and the
    threads end by themselves."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads: set[int] = set()
        threads = self._threads
        self._pool = ThreadPoolExecutor(num_threads, name, initializer=lambda: threads.add(threading.get_ident()))
        self._unfinished: set[Future] = set()

    def submit(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Call a function in one of the threads."""
        future = self._pool.submit(function, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if threading.get_ident() not in self._threads:  # a worker, which collects garbage, cannot wait for itself
            wait(list(self._unfinished))


def in_order(
    workers: Workers, function: Callable[[_Item], _Result], items: Iterable[_Item], num_threads: int
) -> Iterator[_Result]:
    """Map in threads and yield the results in order. At most `num_threads` + 1 results are computed ahead of the
    consumer."""
    waiting: deque[Future[_Result]] = deque()
    try:
        for item in items:
            waiting.append(workers.submit(function, item))
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
