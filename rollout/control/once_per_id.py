"""One id, one call: a call that is repeated under its id gets the first call's answer instead of a second run."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import LockstepError, OpIdTaken

_NUM_REMEMBERED = 1024  # ids whose answers are kept


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    arguments: str  # their SHA-256: some are large
    answer: Future[Any] = field(default_factory=Future)


class OncePerId:
    """Remember the answers of the newest calls with an id (`op_id`). Thread-safe.

    An engine has one, which HTTP uses too: an id names one call, over HTTP and in Python together.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: OrderedDict[str, _Call] = OrderedDict()

    def claim(self, op_id: str | None, name: str, arguments: object = None) -> tuple[Future[Any], bool]:
        """Return the answer of the call with this id, and whether the caller has to run it.

        arguments: plain values that tell this call from others of its name. Without an id every call is new. Raises
        ValueError for an empty id, and OpIdTaken, naming the other call, for an id that names another call.
        """
        if op_id is None:
            return Future(), True
        if not op_id:
            raise ValueError("op_id must not be empty")
        text = json.dumps(arguments, sort_keys=True, default=str)
        call = _Call(name, hashlib.sha256(text.encode()).hexdigest())
        with self._lock:
            known = self._calls.get(op_id)
            if known is None:
                self._calls[op_id] = call
                if len(self._calls) > _NUM_REMEMBERED:
                    self._calls.popitem(last=False)
                return call.answer, True
        if (known.name, known.arguments) != (call.name, call.arguments):
            what = f"{known.name} with other arguments" if known.name == name else known.name
            raise OpIdTaken(f"op_id {op_id!r} stands for another operation: {what}")
        return known.answer, False

    @contextmanager
    def running(self, op_id: str | None, name: str, answer: Future[Any]) -> Iterator[None]:
        """Run a call in the block. Where that ends without its answer, as by Ctrl-C, those who wait for the answer get
        an error, and the next call under its id runs."""
        try:
            yield
        finally:
            if not answer.done():
                with self._lock:
                    self._calls.pop(op_id or "", None)
                answer.set_exception(LockstepError(f"{name} was interrupted before it ended: call it again"))
