"""Records of the bytes that an update has written to a resident tensor, in all and under each name."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout.flat_bytes import Ranges, add_range, gaps, overlaps, remove_range
from ..layout.shard_bytes import ShardBytes
from ..manifest import TensorSpec


@dataclass(frozen=True)
class Place:
    """A name that an update may use, and the bytes that it stands for.

    A resident tensor may be tied, and so have several names in the model; each of them may be sent whole or in pieces.
    """

    spec: TensorSpec  # under that name
    tensor: str  # the name in the model, of which the bytes are all or a piece
    entry: Resident
    start: int  # bytes of the resident tensor
    stop: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_piece(self) -> bool:
        return self.stop - self.start < self.entry.held.num_bytes

    @property
    def unit(self) -> str:
        """The name under which the bytes are compared with digests: a piece's own, else the resident tensor's."""
        return self.name if self.is_piece else self.entry.spec.name

    @property
    def is_written(self) -> bool:
        """Whether any of the bytes were written under the model's name since the last `forget`."""
        entry = self.entry
        bytes_of_tensor = entry.ranges.get(self.tensor, ())
        is_known = self.name in entry.sent or self.tensor in entry.by_elements
        return is_known or bool(overlaps(bytes_of_tensor, self.start, self.stop))

    @property
    def is_covered(self) -> bool:
        """Whether any of the bytes were written, under any name."""
        if not self.is_piece:
            return bool(self.entry.covered or self.entry.names_used())
        return bool(overlaps(self.entry.covered, self.start, self.stop))

    def unwritten(self) -> Ranges:
        """Return the ranges of its own bytes that were not written under this name since the last `forget`, or, where
        bytes written before it were to be followed by others, since it was begun."""
        if self.tensor in self.entry.by_elements and not self.is_piece:
            return ()
        if self.name in self.entry.sent and self.entry.goes_on(self):
            return self.own(overlaps(self.entry.unwritten(), self.start, self.stop))
        return self.own(gaps(self.entry.sent.get(self.name, ()), self.start, self.stop))

    def own(self, ranges: Ranges) -> Ranges:
        """Count bytes of the resident tensor from this place's own first byte."""
        return tuple((start - self.start, stop - self.start) for start, stop in ranges) if self.start else ranges


@dataclass
class Resident:
    """A tensor of the model and the ranges of its bytes that were written, in all and under each of its names.

    Byte offsets are those of the whole tensor, also where this rank holds only a part of it.
    """

    held: ShardBytes
    required: bool
    is_fixed: bool = False  # it is not written: bytes that come for it are compared with those that it has
    covered: Ranges = ()
    ranges: dict[str, Ranges] = field(default_factory=dict)  # by name in the model, covered by `write`, `destination`
    sent: dict[str, Ranges] = field(default_factory=dict)  # the same by the name that was sent
    # Names in the model whose elements were written, with the name that was sent: all bytes count as covered.
    by_elements: dict[str, str] = field(default_factory=dict)
    begun: Ranges = ()  # bytes of places that were begun, perhaps anew, and did not come yet
    begun_before: Ranges = ()  # those of them from before the last `forget`
    units: dict[str, None] = field(default_factory=dict)  # of the bytes that were written last, in order
    in_pieces: Ranges = ()  # bytes that came in pieces since all of them were written last
    unchecked: str | None = None  # why the written bytes could not be checked here

    @property
    def spec(self) -> TensorSpec:
        return self.held.spec

    def covered_as(self, tensor: str) -> Ranges:
        """Return the ranges of bytes that were written under this name of the model."""
        return add_range((), 0, self.held.num_bytes) if tensor in self.by_elements else self.ranges.get(tensor, ())

    def names_used(self) -> set[str]:
        """Return the model's names under which any bytes were written."""
        return set(self.ranges) | set(self.by_elements)

    def covered_by_others(self, tensor: str) -> Ranges:
        """Return the ranges of bytes that were written under any other name of the model."""
        return self._covered_under(self.names_used() - {tensor})

    def has_arrived(self, place: Place) -> bool:
        """Return whether all bytes of a place were written, under whichever names, since the last `forget`, or since it
        was begun where it was begun before that."""
        written = self._covered_under(self.names_used())
        if self.goes_on(place) and overlaps(written, place.start, place.stop):
            return not overlaps(self.unwritten(), place.start, place.stop)
        return not gaps(written, place.start, place.stop)

    def goes_on(self, place: Place) -> bool:
        """Return whether a place was begun before the last `forget` and not whole then."""
        return bool(overlaps(self.begun_before, place.start, place.stop))

    def begin_anew(self, place: Place) -> None:
        """Count all bytes of a place that is not whole as still to come, if it has none since the last `forget`: those
        from before may be of another sender."""
        if self.begun and place.name not in self.sent and overlaps(self.begun, place.start, place.stop):
            self.begun = add_range(self.begun, place.start, place.stop)

    def _covered_under(self, tensors: set[str]) -> Ranges:
        covered: Ranges = ()
        for tensor in tensors:
            for start, stop in self.covered_as(tensor):
                covered = add_range(covered, start, stop)
        return covered

    def sent_as_others(self, place: Place, start: int, stop: int) -> list[str]:
        """Return the sent names that wrote bytes of the range as the same tensor of the model: the whole of a piece, a
        piece of a whole, or a piece of the same bytes."""
        if not self.sent and not self.by_elements:
            return []
        if self.by_elements.get(place.tensor, place.name) != place.name:
            return [self.by_elements[place.tensor]]
        mine, taken = self.sent.get(place.name, ()), overlaps(self.covered_as(place.tensor), start, stop)
        if all(not gaps(mine, a, b) for a, b in taken):
            return []
        return [name for name, ranges in self.sent.items() if name != place.name and overlaps(ranges, start, stop)]

    def cover(self, place: Place, start: int, stop: int) -> None:
        """Count bytes as written under this name. The first ones of a place in an update begin it: it is whole again
        when all of its bytes came, in this update or later ones."""
        if stop - start == self.held.num_bytes:  # as nearly all are
            self.covered = self.ranges[place.tensor] = self.sent[place.name] = add_range((), start, stop)
            self.begun, self.in_pieces, self.units = (), (), {place.unit: None}
            return
        is_begun = place.name in self.sent or place.tensor in self.by_elements
        if not is_begun and not overlaps(self.begun, place.start, place.stop):
            self.begun = add_range(self.begun, place.start, place.stop)
        self.begun = remove_range(self.begun, start, stop)
        self.ranges[place.tensor] = add_range(self.ranges.get(place.tensor, ()), start, stop)
        self.sent[place.name] = add_range(self.sent.get(place.name, ()), start, stop)
        self.covered = add_range(self.covered, start, stop)
        if place.is_piece:
            self.in_pieces = add_range(self.in_pieces, start, stop)
            self.units[place.unit] = None
            if self.in_pieces == ((0, self.held.num_bytes),):
                self.units.pop(self.spec.name, None)
        else:
            self.in_pieces, self.units = (), {place.unit: None}

    def cover_by_elements(self, place: Place) -> None:
        """Count all bytes as written under this name: what changes elements leaves the others as they are to be."""
        self.by_elements[place.tensor] = place.name
        self.begun = tuple(part for start, stop in self.begun_before for part in overlaps(self.begun, start, stop))
        self.covered = add_range((), 0, self.held.num_bytes)
        self.in_pieces, self.units = (), {place.unit: None}

    def unwritten(self) -> Ranges:
        """Return the ranges of bytes that were not written under any name, or are those of a place that was begun anew
        and is not whole again."""
        num_bytes = self.held.num_bytes
        if self.covered == ((0, num_bytes),):
            return self.begun
        absent = gaps(self.covered, 0, num_bytes)
        for start, stop in self.begun:
            absent = add_range(absent, start, stop)
        return absent

    def forget(self) -> None:
        """Forget under which names bytes were written, so that they may be written anew."""
        self.ranges, self.sent, self.by_elements = {}, {}, {}
        self.begun_before = self.begun

    def forget_place(self, place: Place) -> None:
        """Count the bytes of a place as not written, under any name."""
        if not place.is_piece:
            self.forget()
            self.covered, self.begun, self.in_pieces, self.units, self.unchecked = (), (), (), {}, None
            return
        start, stop = place.start, place.stop
        self.ranges = {tensor: self.covered_as(tensor) for tensor in self.names_used()}
        self.by_elements = {}
        self.covered = remove_range(self.covered, start, stop)
        self.begun = remove_range(self.begun, start, stop)
        self.in_pieces = remove_range(self.in_pieces, start, stop)
        self.ranges = {tensor: remove_range(ranges, start, stop) for tensor, ranges in self.ranges.items()}
        left = {name: remove_range(ranges, start, stop) for name, ranges in self.sent.items()}
        self.sent = {name: ranges for name, ranges in left.items() if ranges}
        self.units.pop(place.name, None)
