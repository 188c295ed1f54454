"""Prompts with images as the processor made them: kept for the next samples of a group, and counted while in use."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ....rollout.errors import Overloaded
from ....rollout.giving_way import others_compute


@dataclass(frozen=True, eq=False)  # equal by identity: requests of the same prompt share it
class Made:
    """The token ids of one prompt and the tensors of its images."""

    inputs: Mapping[str, Any]
    ranges: Sequence[tuple[int, int]] = ()  # the first token of each image, and the one behind its last; (): unknown

    @cached_property
    def num_bytes(self) -> int:
        """The size of the tensors."""
        return sum(value.nbytes for value in self.inputs.values() if isinstance(value, Tensor))


class KeptPrompts:
    """The prompts that were made last. Any thread may call; one prompt is made at a time, so that the requests of a
    group, which come together, wait for the first of them."""

    def __init__(self, limit: int) -> None:
        """Keep none. limit: bytes of tensors."""
        self._limit, self._turn, self._num_bytes = limit, threading.Lock(), 0
        self._made: OrderedDict[bytes, Made] = OrderedDict()  # the one that was used last is last

    def of(self, key: bytes, make: Callable[[], Made]) -> Made:
        """Return what was made under a key, or make it now. Raises the errors of `make`."""
        with others_compute(), self._turn:
            found = self._made.pop(key, None)
            if found is None:
                found = make()
                self._num_bytes += found.num_bytes
            self._made[key] = found
            while self._num_bytes > self._limit:
                _, oldest = self._made.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
            return found


class OpenImages:
    """The bytes of images of all requests whose answers are not sent: as they came, and as the processor made them,
    which requests may share. Safe to use from any thread."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._sent: dict[object, int] = {}  # by request
        self._made: dict[object, Collection[Made]] = {}  # likewise
        self._num_users: Counter[Made] = Counter()
        self.num = 0

    def take(self, request: object, num_bytes: int) -> None:
        """Count the images of a request as they came. Raises Overloaded beyond the limit; a request alone is always
        let in."""
        with self._lock:
            self._refuse(num_bytes, 0)
            self._sent[request] = num_bytes
            self.num += num_bytes

    def share(self, request: object, made: Collection[Made]) -> None:
        """Count what was made for a request, where no other one has it. Raises Overloaded likewise."""
        with self._lock:
            num_bytes = sum(one.num_bytes for one in set(made) if one not in self._num_users)
            self._refuse(num_bytes, self._sent.get(request, 0))
            self._made[request] = set(made)
            self._num_users.update(self._made[request])
            self.num += num_bytes

    def release(self, request: object) -> None:
        """Count a request's no longer. Does nothing where they are not counted."""
        with self._lock:
            self.num -= self._sent.pop(request, 0)
            for one in self._made.pop(request, ()):
                self._num_users[one] -= 1
                if not self._num_users[one]:
                    del self._num_users[one]
                    self.num -= one.num_bytes

    def _refuse(self, num_bytes: int, num_own: int) -> None:
        if num_bytes and self.num > num_own and self.num + num_bytes > self._limit:
            raise Overloaded(
                f"the open requests have {self.num} bytes of images, and {num_bytes} more would be over the limit of "
                f"{self._limit} (max_open_image_bytes)"
            )
