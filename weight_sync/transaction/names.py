"""The names under which an update may write a model's tensors, and their places in these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..layout.flat_bytes import Ranges, add_range, overlaps
from ..layout.pieces import Pieces
from ..manifest import TensorSpec, dtype_name
from .coverage import Place, Resident
from .in_place import is_same_memory


class ModelNames:
    """Find places by names: of resident tensors, of tensors that are tied to these, and of pieces of both."""

    def __init__(
        self, tensors: Mapping[str, Resident], aliases: Mapping[str, str], pieces: Pieces | None = None
    ) -> None:
        self._tensors, self._aliases, self._pieces = tensors, aliases, pieces
        self._found: dict[str, Place] = {}

    def place(self, name: str) -> Place:
        """Return the place of a name. Raises ValueError for an unknown one, and for a piece that has none."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def look_up(self, name: str) -> Place | None:
        """Return the place of a name, if it has one."""
        try:
            return self.place(name)
        except ValueError:
            return None

    def resident(self, name: str) -> str:
        """Return the name under which a tensor is resident; an unknown name as it is."""
        place = self.look_up(name)
        return name if place is None else place.entry.spec.name

    def absent(self, entry: Resident) -> dict[str, Ranges]:
        """Return the bytes of a tensor that were not written, by piece where any bytes came in pieces."""
        ranges = entry.unwritten()
        if not ranges:
            return {}
        pieces = next((found for name in tuple(entry.units) if (found := self._siblings(name))), [])
        parts = {piece.name: piece.own(overlaps(ranges, piece.start, piece.stop)) for piece in pieces}
        return {name: part for name, part in parts.items() if part} or {entry.spec.name: ranges}

    def comparable(self, names: Iterable[str], sent: Iterable[str]) -> list[str]:
        """Return those of the names that have bytes in common with the sent ones, and whose bytes all came. A sender
        may know the digests of other names than it sends: of its pieces' tensor, or of a tied one."""
        places = {name: self.place(name) for name in sent}
        by_tensor: dict[str, Ranges] = {}
        for place in places.values():
            tensor = place.entry.spec.name
            by_tensor[tensor] = add_range(by_tensor.get(tensor, ()), place.start, place.stop)

        def is_comparable(name: str) -> bool:
            place = self.look_up(name)
            if place is None:
                return False
            of_sent = overlaps(by_tensor.get(place.entry.spec.name, ()), place.start, place.stop)
            return (bool(of_sent) or name in places) and place.entry.has_arrived(place)  # an empty tensor has no bytes

        return [name for name in names if is_comparable(name)]

    def describe(self, missing: Mapping[str, Ranges]) -> list[str]:
        """Describe missing byte ranges, one text for each name."""
        lines = []
        for name, ranges in missing.items():
            num_bytes = self.place(name).spec.num_bytes
            parts = ", ".join(f"[{a}, {b})" for a, b in ranges)
            lines.append(name if ranges == ((0, num_bytes),) else f"{name} bytes {parts} of {num_bytes}")
        return lines

    def _siblings(self, name: str) -> list[Place]:
        """Return all pieces of the tensor that one is a piece of, if their names are known."""
        if self._pieces is None or not self.place(name).is_piece:
            return []
        return [self.place(piece.name) for piece in self._pieces.siblings(name)]

    def _find(self, name: str) -> Place:
        entry = self._tensors.get(self._aliases.get(name, name))
        if entry is not None:
            return Place(TensorSpec(name, entry.spec.dtype, entry.spec.shape), name, entry, 0, entry.held.num_bytes)
        piece = None if self._pieces is None else self._pieces.piece(name)
        entry = None if piece is None else self._tensors.get(self._aliases.get(piece.whole, piece.whole))
        if piece is None or entry is None:
            raise ValueError(f"{name}: not a tensor of this model")
        spec = TensorSpec(name, entry.spec.dtype, piece.shape)
        start = piece.offset * spec.dtype.itemsize
        return Place(spec, piece.whole, entry, start, start + spec.num_bytes)


def differences(spec: TensorSpec, place: Place) -> list[str]:
    """Describe what differs between an announced tensor and the resident one, or its piece."""
    wrong = []
    if spec.shape != place.spec.shape:
        wrong.append(f"{spec.name}: shape {list(spec.shape)}, resident {list(place.spec.shape)}")
    if spec.dtype != place.spec.dtype:
        wrong.append(f"{spec.name}: dtype {dtype_name(spec.dtype)}, resident {dtype_name(place.spec.dtype)}")
    return wrong


def same_bytes(places: Iterable[Place]) -> list[str]:
    """Describe the names that stand for bytes of one tensor of the model that another name stands for, too."""
    by_tensor: dict[str, list[Place]] = {}
    for place in places:
        by_tensor.setdefault(place.tensor, []).append(place)
    wrong = []
    for same in by_tensor.values():
        same.sort(key=lambda place: (place.start, -place.stop))
        furthest = same[0]
        for place in same[1:]:
            if place.start < min(place.stop, furthest.stop):
                wrong.append(f"{place.name}: its bytes are also those of {furthest.name}")
            furthest = max(furthest, place, key=lambda place: place.stop)
    return wrong


def check_tensors(named: Sequence[tuple[str, Tensor]], aliases: Mapping[str, str], elsewhere: Collection[str]) -> None:
    """Raise ValueError listing aliases of unknown tensors, names that come twice and tensors that share memory."""
    wrong = [f"{name} is here and elsewhere" for name, _ in named if name in elsewhere]
    tensors: dict[str, Tensor] = {}
    at: dict[tuple[object, ...], str] = {}
    for name, tensor in named:
        if name in tensors:
            wrong.append(f"{name} is named more than once")
        tensors[name] = tensor
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype)
        other = at.setdefault(place, name)
        if other != name and tensor.numel() and is_same_memory(tensor, tensors[other]):
            wrong.append(f"{name} is the same memory as {other}: one of them must be an alias")
    known = {*tensors, *elsewhere}
    wrong += [f"alias {alias} is of unknown {name}" for alias, name in aliases.items() if name not in known]
    wrong += [f"alias {alias} is a tensor of its own" for alias in aliases if alias in known]
    if wrong:
        raise ValueError("; ".join(wrong))


def written_as(name: str, others: Sequence[str]) -> str:
    """Describe a name whose bytes were written under these other names."""
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"{name}: some of its bytes were written already as {others[0]}{more}"


def overlapping(name: str) -> str:
    """Describe a tensor that cannot be written, since its own elements share memory."""
    return (
        f"{name}: elements of the resident tensor share memory, as after expand(), so that it cannot be written: give "
        "each its own (tensor.data = tensor.data.contiguous())"
    )


def checked_elements(place: Place, positions: Tensor, values: Tensor) -> Tensor:
    """Return `values` as words of the tensor. Raises ValueError for values or positions that do not fit it."""
    name, entry = place.name, place.entry
    if positions.dtype != torch.int64 or positions.dim() != 1 or positions.shape != values.shape:
        raise ValueError(f"{name}: positions must be int64 [n] and values [n], not {dtype_name(positions.dtype)}"
                         f"{list(positions.shape)} and {list(values.shape)}")  # fmt: skip
    dtype = entry.spec.dtype
    is_integer = not (values.is_floating_point() or values.is_complex())
    if values.dtype != dtype and not (is_integer and values.itemsize == dtype.itemsize):
        raise ValueError(f"{name}: values are {dtype_name(values.dtype)}, resident {dtype_name(dtype)}")
    if positions.numel():
        lowest, highest = (int(bound) for bound in positions.aminmax())
        if lowest < 0 or highest >= entry.spec.num_elements:
            raise ValueError(f"{name}: positions {lowest} to {highest} leave its {entry.spec.num_elements} elements")
    return entry.held.local.as_words(values)
