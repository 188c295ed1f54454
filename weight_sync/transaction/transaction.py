"""One update of resident tensors that takes effect whole or not at all.

open -- commit --> committed -- revert --> rolled_back
   \\-- rollback --> rolled_back, or poisoned where the old bytes were not kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import Poisoned, SessionError
from ..layout.bucket import byte_view
from ..layout.flat_bytes import Ranges, gaps, overlaps, overlaps_itself
from ..layout.pieces import Pieces
from ..layout.shard_bytes import Shard, ShardBytes
from ..manifest import NamedTensors, TensorSpec, dtype_name
from .coverage import Place, Resident
from .names import ModelNames, check_tensors, checked_elements, differences, overlapping, same_bytes, written_as
from .undo import UndoLog

Coverage = Literal["full", "partial"]
Undo = Literal["tensors", "none"]
State = Literal["open", "committed", "rolled_back", "poisoned"]


class WeightTransaction:
    """A `Sink` over resident tensors that keeps the bytes it overwrites.

    resident: tensors that a full update writes exactly once, tied tensors once and under one name. optional: tensors
    that it may write besides (buffers). fixed: tensors that it may name, but only with the bytes that they have, else
    ValueError names them. aliases: other names of resident or optional tensors (`lm_head.weight` ->
    `model.embed_tokens.weight`); bytes that arrive under a second name are compared with the bytes that arrived under
    the first. With `coverage="partial"` any of the tensors may be written, and more than once. With `undo="none"` no
    old bytes are kept, and a rollback after the first overwritten byte poisons the weights.

    shards: by name, the part of a tensor that this rank holds, where that is not all of it. elsewhere: tensors of the
    model of which this rank holds no part; optional_elsewhere: those of them that an update may leave out. All take the
    bytes of the whole tensor, and only this rank's part is kept; so every rank of a sharded model can be given the same
    update, and checks that all of it came.

    pieces: further names, of pieces of any of these tensors. Of a tensor of the model no byte may come under two names.
    A tensor that came in pieces is complete when all of them did.

    Raises ValueError listing aliases of unknown tensors, names that come twice and tensors that share their memory. A
    tensor whose own elements share memory is not written: `expect` and the writes refuse it, and under full coverage,
    where it is required, so does this.
    Used by one thread at a time. The tensors must keep their memory as long as the transaction exists.
    """

    def __init__(
        self,
        resident: NamedTensors,
        *,
        optional: NamedTensors = (),
        fixed: NamedTensors = (),
        aliases: Mapping[str, str] | None = None,
        coverage: Coverage = "full",
        undo: Undo = "tensors",
        shards: Mapping[str, Shard] | None = None,
        elsewhere: Sequence[TensorSpec] = (),
        optional_elsewhere: Sequence[TensorSpec] = (),
        pieces: Pieces | None = None,
    ) -> None:
        if coverage not in ("full", "partial"):
            raise ValueError(f'coverage must be "full" or "partial", not {coverage!r}')
        if undo not in ("tensors", "none"):
            raise ValueError(f'undo must be "tensors" or "none", not {undo!r}')
        self.coverage, self.undo = coverage, undo
        self.state: State = "open"
        self.num_writes = 0  # calls that began to write; while it does not grow, nothing has changed
        self.overwritten: set[str] = set()  # resident names of tensors that it wrote here, also if they were restored
        self.before_overwriting: Callable[[str], object] = lambda name: None  # called once for each of them
        kept = dict(fixed)
        named = [(name, tensor, True) for name, tensor in resident]
        named += [(name, tensor, False) for name, tensor in (*optional, *kept.items())]
        absent = [(spec, True) for spec in elsewhere] + [(spec, False) for spec in optional_elsewhere]
        names_elsewhere = {spec.name for spec, _ in absent}
        check_tensors([(name, tensor) for name, tensor, _ in named], aliases or {}, names_elsewhere)
        self._overlapping = {name for name, tensor, _ in named if overlaps_itself(tensor)}
        if coverage == "full" and (wrong := [n for n, _, required in named if required and n in self._overlapping]):
            raise ValueError(overlapping(", ".join(wrong)))
        parts = shards or {}
        self._tensors = {n: Resident(ShardBytes(n, t, parts.get(n)), required, n in kept) for n, t, required in named}
        self._tensors |= {spec.name: Resident(ShardBytes.nothing(spec), required) for spec, required in absent}
        self._names = ModelNames(self._tensors, dict(aliases or {}), pieces)
        self._log: UndoLog | None = None
        if undo == "tensors":
            self._log = UndoLog({name: entry.held.local for name, entry in self._tensors.items()})

    # -- the sink -----------------------------------------------------------------------------------------------------

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Check the announced tensors; see `Sink.expect`. Under full coverage a tensor that was already written is an
        error too; under partial coverage one that is only partly written begins anew."""
        self._require("open")
        wrong, places = [], dict[str, Place]()
        for spec in specs:
            try:
                place = self._names.place(spec.name)
            except ValueError as error:
                wrong.append(str(error))
                continue
            if spec.name in places:
                wrong.append(f"{spec.name}: named more than once")
                continue
            places[spec.name] = place
            if place.entry.spec.name in self._overlapping:
                wrong.append(overlapping(spec.name))
            wrong += differences(spec, place)
            if others := place.entry.sent_as_others(place, place.start, place.stop):
                wrong.append(written_as(spec.name, others))
            elif self.coverage == "full" and place.is_written:
                wrong.append(f"{spec.name}: written already in this transaction")
        if wrong := wrong + same_bytes(places.values()):
            raise ValueError(f"the update does not fit: {'; '.join(wrong)}")
        for place in places.values() if self.coverage == "partial" else ():
            place.entry.begin_anew(place)

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        """Return memory to receive bytes into; see `Sink.destination`. Raises ValueError for a range outside the tensor
        or, under full coverage, for one that was already written."""
        place = self._place_to_write(name, offset, offset + num_bytes)
        entry, start, stop = place.entry, place.start + offset, place.start + offset + num_bytes
        lent = entry.held.lend(start, stop)
        if lent is None or entry.is_fixed or overlaps(entry.covered_by_others(place.tensor), start, stop):
            return None
        self.num_writes += 1
        self._save(entry, start, stop)
        entry.cover(place, start, stop)
        return lent

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Write bytes; see `Sink.write`. Raises ValueError as `destination` does, and where the bytes differ from those
        that arrived under the tensor's other name."""
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"{name}: data must be uint8 [n], not {dtype_name(data.dtype)}{list(data.shape)}")
        place = self._place_to_write(name, offset, offset + data.numel())
        entry, start, stop = place.entry, place.start + offset, place.start + offset + data.numel()
        others = ((start, stop),) if entry.is_fixed else entry.covered_by_others(place.tensor)
        for a, b in overlaps(others, start, stop):
            if not entry.held.agrees_with(a, data[a - start : b - start]):
                raise ValueError(self._differs(place))
        if not entry.is_fixed:
            self.num_writes += 1
        for a, b in gaps(others, start, stop):
            self._save(entry, a, b)
            entry.held.write(a, data[a - start : b - start])
        entry.cover(place, start, stop)

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Write single elements; see `Sink.write_elements`. Raises ValueError for positions outside the tensor, values
        of another dtype or number, and as `write` does for a tensor that was written under its other name."""
        place = self._place_to_write(name, 0, 0)
        entry, words = place.entry, checked_elements(self._require_whole(place), positions, values)
        if not entry.held.is_whole:
            here, positions = entry.held.local_elements(positions.to(words.device))
            words = words[here]
        if entry.is_fixed or entry.names_used() - {place.tensor}:
            if not torch.equal(byte_view(entry.held.local.take(positions)), byte_view(words)):
                raise ValueError(self._differs(place))
            self.num_writes += 1
        else:
            self.num_writes += 1
            if words.numel():
                self._overwrites(entry)
            if self._log is not None:
                self._log.save_elements(entry.spec.name, positions)
            entry.held.local.put(positions, words)
        entry.cover_by_elements(place)

    def held(self, name: str) -> ShardBytes:
        """Return the bytes that this rank holds of a tensor; see `Sink.held`. Raises ValueError for an unknown name,
        and for a piece."""
        return self._require_whole(self._names.place(name)).entry.held

    def leave_unchecked(self, name: str, why: str) -> None:
        """Mark written bytes as unchecked; see `Sink.leave_unchecked`. Raises ValueError for an unknown name."""
        self._names.place(name).entry.unchecked = why

    def resident(self, name: str) -> Tensor:
        """Return this rank's part of a tensor in its present state. Raises ValueError for an unknown name, and for a
        piece."""
        return self.held(name).local.tensor

    # -- written bytes ------------------------------------------------------------------------------------------------

    def tensor_name(self, name: str) -> str:
        """Return the name under which a tensor is resident, for any of its names and those of its pieces."""
        return self._names.resident(name)

    def units(self, name: str) -> set[str]:
        """Return the names that are verified with this one: of a piece its own; of a tensor the resident one, and those
        of the pieces in which it came."""
        place = self._names.look_up(name)
        if place is None:
            return {name}
        return {place.unit} if place.is_piece else {place.unit, *place.entry.units}

    def written_names(self) -> tuple[str, ...]:
        """Return the resident names of the tensors of which any bytes were written."""
        return tuple(name for name, entry in self._tensors.items() if entry.covered or entry.names_used())

    def written_units(self) -> tuple[str, ...]:
        """Return the names under which the written bytes are verified: `written_names`, or the pieces of a tensor that
        came in pieces."""
        return tuple(unit for entry in self._tensors.values() for unit in entry.units)

    def comparable(self, names: Iterable[str], specs: Sequence[TensorSpec]) -> list[str]:
        """Return those of the names that have bytes in common with these tensors and whose bytes all came, under
        whichever names, in the update (or it and those before it, of a tensor that one of these has begun), or in the
        transaction under full coverage."""
        return self._names.comparable(names, [spec.name for spec in specs])

    def has_written(self, name: str) -> bool:
        """Return whether any bytes of this name were written, under whichever name."""
        place = self._names.look_up(name)
        return place is not None and place.is_covered

    def missing(self) -> dict[str, Ranges]:
        """Return the byte ranges of required tensors that were not written, by resident name, or by piece where some of
        their pieces were."""
        return {n: ranges for e in self._tensors.values() if e.required for n, ranges in self._names.absent(e).items()}

    def unwritten(self, names: Iterable[str]) -> dict[str, Ranges]:
        """Return the byte ranges that did not arrive under these names since `start_update`, or, of a tensor that an
        earlier update has begun, since then. Raises ValueError for an unknown name."""
        found = {place.name: place.unwritten() for place in map(self._names.place, names)}
        return {name: ranges for name, ranges in found.items() if ranges}

    def unchecked(self) -> dict[str, str]:
        """Return, by resident name, why tensors that were written since `start_update` have to be compared with the
        sender's digests before a commit."""
        return {name: entry.unchecked for name, entry in self._tensors.items() if entry.unchecked is not None}

    def describe(self, missing: Mapping[str, Ranges]) -> list[str]:
        """Describe missing byte ranges, one text for each tensor or piece."""
        return self._names.describe(missing)

    @property
    def num_undo_bytes(self) -> int:
        """Size in bytes of the memory that the undo data takes."""
        return self._log.num_bytes if self._log is not None else 0

    @property
    def can_revert(self) -> bool:
        """Whether a commit has happened and its undo data is still kept."""
        return self.state == "committed" and (self._log is not None or not self.overwritten)

    # -- transitions --------------------------------------------------------------------------------------------------

    def start_update(self) -> None:
        """Start the next of several updates. Under partial coverage it may write the same tensors again. Only bytes of
        the same update are compared between two names of a tensor."""
        self._require("open")
        for entry in self._tensors.values():
            entry.unchecked = None
            if self.coverage == "partial":
                entry.forget()

    def check_complete(self) -> None:
        """Raise ValueError listing the tensors that prevent a commit. Changes nothing.

        Under full coverage these are required tensors that were not written; under either coverage, tensors that are
        only partly written.
        """
        torn = {n: r for e in self._tensors.values() if e.covered for n, r in self._names.absent(e).items()}
        absent = {**self.missing(), **torn} if self.coverage == "full" else torn
        if absent:
            raise ValueError(f"{len(absent)} tensors were not wholly written: {'; '.join(self.describe(absent))}")

    def commit(self) -> None:
        """Keep the written bytes. Raises as `check_complete`; then the transaction stays open."""
        self._require("open")
        self.check_complete()
        self.state = "committed"

    def rollback(self) -> None:
        """Restore every resident byte. Poisons the weights where old bytes were not kept or could not be restored."""
        self._require("open")
        self._put_everything_back()

    def revert(self) -> None:
        """Take a commit back as `rollback` does. Raises SessionError where its undo data is gone."""
        self._require("committed")
        if not self.can_revert:
            raise SessionError("the commit cannot be reverted: what it overwrote is not kept any more")
        self._put_everything_back()

    def restore(self, names: Iterable[str]) -> None:
        """Restore these tensors to their bytes before the transaction and count them as not written.

        Raises ValueError for an unknown name, and Poisoned (the state is then poisoned) where no old bytes were kept.
        """
        self._require("open")
        places = [self._names.place(name) for name in names]
        if self._log is None and any(place.entry.covered for place in places):
            self.state = "poisoned"
            names = ", ".join(place.name for place in places)
            raise Poisoned(f'{names} cannot be restored: the transaction has undo="none"')
        for place in places:
            if self._log is not None:
                first, last = place.entry.held.local_range(place.start, place.stop)
                self._log.restore(place.entry.spec.name, first, last)
            place.entry.forget_place(place)

    def release_undo(self) -> None:
        """Free the undo data; a commit cannot be reverted from then on. Raises SessionError while the transaction is
        open."""
        if self.state == "open":
            raise SessionError("the transaction is open: its undo is needed")
        self._drop_log()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _put_everything_back(self) -> None:
        self.state = "poisoned"  # until every byte is restored
        if self._log is not None:
            self._log.restore_all()
            self._drop_log()
        elif self.overwritten:
            return
        self.state = "rolled_back"

    def _drop_log(self) -> None:
        if self._log is not None:
            self._log.release()
            self._log = None

    def _require(self, state: State) -> None:
        if self.state != state:
            raise SessionError(f"the transaction is {self.state}, not {state}")

    def _require_whole(self, place: Place) -> Place:
        if place.is_piece:
            raise ValueError(f"{place.name}: changes are applied to whole tensors: send those of {place.tensor}")
        return place

    def _place_to_write(self, name: str, start: int, stop: int) -> Place:
        """Return the place of a name, of whose bytes [start, stop) are about to be written."""
        self._require("open")
        place = self._names.place(name)
        if place.entry.spec.name in self._overlapping:
            raise ValueError(overlapping(name))
        size = place.spec.dtype.itemsize
        if not 0 <= start <= stop <= place.spec.num_bytes or start % size or stop % size:
            raise ValueError(f"{place.spec.describe()}: [{start}, {stop}) is no range of whole elements in it")
        first, last = place.start + start, place.start + stop
        if others := place.entry.sent_as_others(place, first, last):
            raise ValueError(written_as(name, others))
        if self.coverage == "full" and overlaps(place.entry.ranges.get(place.tensor, ()), first, last):
            raise ValueError(f"{name}: bytes [{start}, {stop}) were written already in this transaction")
        return place

    def _save(self, entry: Resident, start: int, stop: int) -> None:
        first, last = entry.held.local_range(start, stop)
        if last > first:
            self._overwrites(entry)
        if self._log is not None:
            self._log.save_range(entry.spec.name, first, last)

    def _overwrites(self, entry: Resident) -> None:
        if entry.spec.name not in self.overwritten:
            self.before_overwriting(entry.spec.name)
            self.overwritten.add(entry.spec.name)

    def _differs(self, place: Place) -> str:
        if place.entry.is_fixed:
            return f"{place.name}: no part of checkpoints or of the digest, so it keeps its bytes, but others were sent"
        others = ", ".join(sorted(place.entry.names_used() - {place.tensor}))
        return f"{place.name} and {others} are one tensor here, but the update has different bytes for them"
