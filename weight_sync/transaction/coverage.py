"""Which bytes of a resident tensor an update has written, and under which names."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout.flat_bytes import Ranges, add_range, gaps
from ..layout.shard_bytes import ShardBytes
from ..manifest import TensorSpec


@dataclass
class Resident:
    """A tensor of the model and which of its bytes were written, in all and under each of its names. Bytes are those of
    the whole tensor, also where only a part of it is here."""

    held: ShardBytes
    required: bool
    covered: Ranges = ()
    ranges: dict[str, Ranges] = field(default_factory=dict)  # by name, what `write` and `destination` covered
    by_elements: set[str] = field(default_factory=set)  # names under which elements were written: they cover it all
    unchecked: str | None = None  # why what was written could not be checked here

    @property
    def spec(self) -> TensorSpec:
        return self.held.spec

    def covered_as(self, name: str) -> Ranges:
        """Give the bytes that were written under this name."""
        return add_range((), 0, self.held.num_bytes) if name in self.by_elements else self.ranges.get(name, ())

    def names_used(self) -> set[str]:
        """List the names under which anything was written."""
        return set(self.ranges) | self.by_elements

    def covered_by_others(self, name: str) -> Ranges:
        """Give the bytes that were written under any other name."""
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
        """Bytes not written in all, or under one name."""
        covered = self.covered if name is None else self.covered_as(name)
        num_bytes = self.held.num_bytes
        return () if covered == ((0, num_bytes),) else gaps(covered, 0, num_bytes)  # most are whole: asked often

    def forget(self) -> None:
        """Forget under which names bytes were written, so that they may be written anew."""
        self.ranges, self.by_elements = {}, set()

    def forget_everything(self) -> None:
        """Count nothing as written."""
        self.forget()
        self.covered, self.unchecked = (), None
