"""One update of resident tensors that takes effect whole or not at all.

open -- commit --> committed -- revert --> rolled_back
   \\-- rollback --> rolled_back, or poisoned where the old bytes were not kept
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import Poisoned, SessionError
from ..layout.bucket import byte_view
from ..layout.flat_bytes import Ranges, gaps, overlaps, overlaps_itself
from ..layout.shard_bytes import Shard, ShardBytes
from ..manifest import NamedTensors, TensorSpec, dtype_name
from .coverage import Resident
from .in_place import is_same_memory
from .undo import UndoLog

Coverage = Literal["full", "partial"]
Undo = Literal["tensors", "none"]
State = Literal["open", "committed", "rolled_back", "poisoned"]


class WeightTransaction:
    """A `Sink` over resident tensors that keeps the bytes it overwrites.

    resident: tensors that a full update writes exactly once, tied tensors once and under one name. optional: tensors
    that it may write besides (buffers). aliases: other names of resident or optional tensors (`lm_head.weight` ->
    `model.embed_tokens.weight`); bytes that arrive under a second name are compared with the bytes that arrived under
    the first. With `coverage="partial"` any of the tensors may be written, and more than once. With `undo="none"` no
    old bytes are kept, and a rollback after the first overwritten byte poisons the weights.

    shards: by name, the part of a tensor that this rank holds, where that is not all of it. elsewhere: tensors of the
    model of which this rank holds no part; optional_elsewhere: those of them that an update may leave out. All take the
    bytes of the whole tensor, and only this rank's part is kept; so every rank of a sharded model can be given the same
    update, and checks that all of it came.

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
        aliases: Mapping[str, str] | None = None,
        coverage: Coverage = "full",
        undo: Undo = "tensors",
        shards: Mapping[str, Shard] | None = None,
        elsewhere: Sequence[TensorSpec] = (),
        optional_elsewhere: Sequence[TensorSpec] = (),
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
        self._aliases = dict(aliases or {})
        named = [(name, tensor, True) for name, tensor in resident] + [(n, t, False) for n, t in optional]
        absent = [(spec, True) for spec in elsewhere] + [(spec, False) for spec in optional_elsewhere]
        names_elsewhere = {spec.name for spec, _ in absent}
        _check_tensors([(name, tensor) for name, tensor, _ in named], self._aliases, names_elsewhere)
        self._overlapping = {name for name, tensor, _ in named if overlaps_itself(tensor)}
        if coverage == "full" and (wrong := [n for n, _, required in named if required and n in self._overlapping]):
            raise ValueError(_overlap(", ".join(wrong)))
        parts = shards or {}
        self._tensors = {n: Resident(ShardBytes(n, t, parts.get(n)), required) for n, t, required in named}
        self._tensors |= {spec.name: Resident(ShardBytes.nothing(spec), required) for spec, required in absent}
        self._log: UndoLog | None = None
        if undo == "tensors":
            self._log = UndoLog({name: entry.held.local for name, entry in self._tensors.items()})

    # -- the sink -----------------------------------------------------------------------------------------------------

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        """Check the announced tensors; see `Sink.expect`. Under full coverage a tensor that was already written is an
        error too."""
        self._require("open")
        wrong, seen = [], set()
        for spec in specs:
            if spec.name in seen:
                wrong.append(f"{spec.name}: named more than once")
                continue
            seen.add(spec.name)
            entry = self._tensors.get(self.tensor_name(spec.name))
            if entry is None:
                wrong.append(f"{spec.name}: not a tensor of this model")
                continue
            if entry.spec.name in self._overlapping:
                wrong.append(_overlap(spec.name))
            if spec.shape != entry.spec.shape:
                wrong.append(f"{spec.name}: shape {list(spec.shape)}, resident {list(entry.spec.shape)}")
            if spec.dtype != entry.spec.dtype:
                wrong.append(f"{spec.name}: dtype {dtype_name(spec.dtype)}, resident {dtype_name(entry.spec.dtype)}")
            if self.coverage == "full" and spec.name in entry.names_used():
                wrong.append(f"{spec.name}: written already in this transaction")
        if wrong:
            raise ValueError(f"the update does not fit: {'; '.join(wrong)}")

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        """Return memory to receive bytes into; see `Sink.destination`. Raises ValueError for a range outside the tensor
        or, under full coverage, for one that was already written."""
        stop = offset + num_bytes
        entry = self._entry_to_write(name, offset, stop)
        lent = entry.held.lend(offset, stop)
        if lent is None or overlaps(entry.covered_by_others(name), offset, stop):
            return None
        self.num_writes += 1
        self._save(entry, offset, stop)
        entry.cover(name, offset, stop)
        return lent

    def write(self, name: str, offset: int, data: Tensor) -> None:
        """Write bytes; see `Sink.write`. Raises ValueError as `destination` does, and where the bytes differ from those
        that arrived under the tensor's other name."""
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(f"{name}: data must be uint8 [n], not {dtype_name(data.dtype)}{list(data.shape)}")
        stop = offset + data.numel()
        entry = self._entry_to_write(name, offset, stop)
        others = entry.covered_by_others(name)
        for a, b in overlaps(others, offset, stop):
            if not entry.held.agrees_with(a, data[a - offset : b - offset]):
                raise ValueError(self._tie_broken(entry, name))
        self.num_writes += 1
        for a, b in gaps(others, offset, stop):
            self._save(entry, a, b)
            entry.held.write(a, data[a - offset : b - offset])
        entry.cover(name, offset, stop)

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        """Write single elements; see `Sink.write_elements`. Raises ValueError for positions outside the tensor, values
        of another dtype or number, and as `write` does for a tensor that was written under its other name."""
        entry = self._entry_to_write(name, 0, 0)
        words = _checked_elements(entry, name, positions, values)
        if not entry.held.is_whole:
            here, positions = entry.held.local_elements(positions.to(words.device))
            words = words[here]
        if entry.names_used() - {name}:
            if not torch.equal(byte_view(entry.held.local.take(positions)), byte_view(words)):
                raise ValueError(self._tie_broken(entry, name))
            self.num_writes += 1
        else:
            self.num_writes += 1
            if words.numel():
                self._overwrites(entry)
            if self._log is not None:
                self._log.save_elements(entry.spec.name, positions)
            entry.held.local.put(positions, words)
        entry.cover_by_elements(name)

    def held(self, name: str) -> ShardBytes:
        """Return the bytes that this rank holds of a tensor; see `Sink.held`. Raises ValueError for an unknown name."""
        return self._entry(name).held

    def leave_unchecked(self, name: str, why: str) -> None:
        """Mark written bytes as unchecked; see `Sink.leave_unchecked`. Raises ValueError for an unknown name."""
        self._entry(name).unchecked = why

    def resident(self, name: str) -> Tensor:
        """Return this rank's part of a tensor in its present state. Raises ValueError for an unknown name."""
        return self._entry(name).held.local.tensor

    # -- written bytes ------------------------------------------------------------------------------------------------

    def tensor_name(self, name: str) -> str:
        """Return the name under which a tensor is resident, for any of its names."""
        return self._aliases.get(name, name)

    def written_names(self) -> tuple[str, ...]:
        """Return the resident names of the tensors of which any bytes were written."""
        return tuple(name for name, entry in self._tensors.items() if entry.covered or entry.names_used())

    def missing(self) -> dict[str, Ranges]:
        """Return the byte ranges of required tensors that were not written, by resident name."""
        return {n: ranges for n, e in self._tensors.items() if e.required and (ranges := e.unwritten())}

    def unwritten(self, names: Iterable[str]) -> dict[str, Ranges]:
        """Return the byte ranges that did not arrive under these names since `start_update`. Raises ValueError as
        `resident`."""
        found = {name: self._entry(name).unwritten(name) for name in names}
        return {name: ranges for name, ranges in found.items() if ranges}

    def unchecked(self) -> dict[str, str]:
        """Return, by resident name, why tensors that were written since `start_update` have to be compared with the
        sender's digests before a commit."""
        return {name: entry.unchecked for name, entry in self._tensors.items() if entry.unchecked is not None}

    def describe(self, missing: Mapping[str, Ranges]) -> list[str]:
        """Describe missing byte ranges, one text for each tensor."""
        lines = []
        for name, ranges in missing.items():
            num_bytes = self._entry(name).held.num_bytes
            parts = ", ".join(f"[{a}, {b})" for a, b in ranges)
            lines.append(name if ranges == ((0, num_bytes),) else f"{name} bytes {parts} of {num_bytes}")
        return lines

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
        torn = {n: e.unwritten() for n, e in self._tensors.items() if e.covered and e.unwritten()}
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
        entries = {entry.spec.name: entry for entry in map(self._entry, names)}
        if self._log is None and any(entry.covered for entry in entries.values()):
            self.state = "poisoned"
            raise Poisoned(f'{", ".join(entries)} cannot be restored: the transaction has undo="none"')
        if self._log is not None:
            self._log.restore(entries)
        for entry in entries.values():
            entry.forget_everything()

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

    def _entry(self, name: str) -> Resident:
        entry = self._tensors.get(self.tensor_name(name))
        if entry is None:
            raise ValueError(f"{name}: not a tensor of this model")
        return entry

    def _entry_to_write(self, name: str, start: int, stop: int) -> Resident:
        self._require("open")
        entry = self._entry(name)
        if entry.spec.name in self._overlapping:
            raise ValueError(_overlap(name))
        size = entry.spec.dtype.itemsize
        if not 0 <= start <= stop <= entry.held.num_bytes or start % size or stop % size:
            raise ValueError(f"{entry.spec.describe()}: [{start}, {stop}) is no range of whole elements in it")
        if self.coverage == "full" and overlaps(entry.ranges.get(name, ()), start, stop):
            raise ValueError(f"{name}: bytes [{start}, {stop}) were written already in this transaction")
        return entry

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

    def _tie_broken(self, entry: Resident, name: str) -> str:
        others = ", ".join(sorted(entry.names_used() - {name}))
        return f"{name} and {others} are one tensor here, but the update has different bytes for them"


def _check_tensors(named: Sequence[tuple[str, Tensor]], aliases: Mapping[str, str], elsewhere: Collection[str]) -> None:
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


def _overlap(name: str) -> str:
    return (
        f"{name}: elements of the resident tensor share memory, as after expand(), so that it cannot be written: give "
        "each its own (tensor.data = tensor.data.contiguous())"
    )


def _checked_elements(entry: Resident, name: str, positions: Tensor, values: Tensor) -> Tensor:
    """Return `values` as words of the tensor. Raises ValueError for values or positions that do not fit it."""
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
