"""Records of the bytes that an update has written to a resident tensor, in all and under each name."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout.flat_bytes import Ranges, add_range, gaps
from ..layout.shard_bytes import ShardBytes
from ..manifest import TensorSpec


@dataclass
class Resident:
    """A tensor of the model and the ranges of its bytes that were written, in all and under each of its names.

    Byte offsets are those of the whole tensor, also where this rank holds only a part of it.
    """

    held: ShardBytes
    required: bool
    covered: Ranges = ()
    ranges: dict[str, Ranges] = field(default_factory=dict)  # by name, the bytes that `write` and `destination` covered
    by_elements: set[str] = field(default_factory=set)  # names whose elements were written: all bytes count as covered
    unchecked: str | None = None  # why the written bytes could not be checked here

    @property
    def spec(self) -> TensorSpec:
        return self.held.spec

    def covered_as(self, name: str) -> Ranges:
        """Return the ranges of bytes that were written under this name."""
        return add_range((), 0, self.held.num_bytes) if name in self.by_elements else self.ranges.get(name, ())

    def names_used(self) -> set[str]:
        """Return the names under which any bytes were written."""
        return set(self.ranges) | self.by_elements

    def covered_by_others(self, name: str) -> Ranges:
        """Return the ranges of bytes that were written under any other name."""
        parts = [part for other in self.names_used() - {name} for part in self.covered_as(other)]
        covered: Ranges = ()
        for start, stop in parts:
            covered = add_range(covered, start, stop)
        return covered

    def cover(self, name: str, start: int, stop: int) -> None:
        """Count bytes as written under this name."""
        self.ranges[name] = add_range(self.ranges.get(name, ()), start, stop)
        self.covered = add_range(self.covered, start, stop)

    def cover_by_elements(self, name: str) -> None:
        """Count all bytes as written under this name."""
        self.by_elements.add(name)
        self.covered = add_range((), 0, self.held.num_bytes)

    def unwritten(self, name: str | None = None) -> Ranges:
        """Return the ranges of bytes that were not written, in all or under one name."""
        covered = self.covered if name is None else self.covered_as(name)
        num_bytes = self.held.num_bytes
        return () if covered == ((0, num_bytes),) else gaps(covered, 0, num_bytes)  # the first case is frequent

    def forget(self) -> None:
        """Forget under which names bytes were written, so that they may be written anew."""
        self.ranges, self.by_elements = {}, set()

    def forget_everything(self) -> None:
        """Count nothing as written."""
        self.forget()
        self.covered, self.unchecked = (), None
