"""The division of a step's samples into micro-batches, as pure functions.

Samples without a gradient (`Sample.has_gradient`) stand in micro-batches of their own, which need no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .packing import Sample
from .shared_prefixes import RowTree

Cost = Callable[[Sample, int], float]  # of a sample that adds so many rows to a micro-batch


@dataclass(frozen=True)
class Microbatch:
    """Samples that go through the model together, in the order in which they came."""

    samples: Sequence[Sample]
    learns: bool  # whether it has a backward pass
    is_last: bool = False  # whether it is the rank's last one with a backward pass


class _Run:
    """A micro-batch in the making."""

    def __init__(self, cost: Cost, *, shares: bool) -> None:
        self.samples: list[Sample] = []
        self._cost_of, self._tree = cost, RowTree(shares=shares)
        self._whole = self._shared = 0.0  # costs of the samples with rows of their own, and as the tree has them
        self._has_images = False  # then `pack` shares nothing

    @property
    def cost(self) -> float:
        return self._whole if self._has_images else self._shared

    def cost_with(self, sample: Sample) -> float:
        """Return the cost with one sample more."""
        if self._has_images or sample.images is not None:
            return self._whole + self._cost_of(sample, sample.num_rows)
        return self._shared + self._cost_of(sample, self._tree.num_new(sample.input_ids))

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        before = len(self._tree.token_ids)
        self._tree.add(sample.input_ids)
        self._shared += self._cost_of(sample, len(self._tree.token_ids) - before)
        self._whole += self._cost_of(sample, sample.num_rows)
        self._has_images |= sample.images is not None
        self.samples.append(sample)


def microbatches(
    samples: Iterable[Sample],
    limit: float,
    cost: Cost,
    learns: Callable[[Sample], bool],
    *,
    shares: bool = False,
    needs_last: bool = True,
) -> Iterator[Microbatch]:
    """Divide samples, in order, into micro-batches whose costs are at most `limit`. A costlier sample is one by itself.

    shares: samples that begin alike have rows in common in a micro-batch. learns: whether a sample has a gradient. One
    that has and one that has not are never in one micro-batch. A micro-batch is yielded as soon as the next sample of
    its kind is there; the last one with a backward pass is the last of all. Without `needs_last` one that has no room
    for another sample is yielded at once, and the last may not be marked as such. If no sample has a gradient, the
    shortest of the last run has a backward pass nevertheless, of zeros: the other ranks, and the moments of AdamW, need
    one in each step.
    """
    runs, has_learned = {kind: _Run(cost, shares=shares) for kind in (True, False)}, False
    for sample in samples:
        kind = learns(sample)
        run = runs[kind]
        if run.samples and run.cost_with(sample) > limit:
            yield Microbatch(run.samples, kind)
            run = runs[kind] = _Run(cost, shares=shares)
        run.add(sample)
        has_room = run.cost < limit or (shares and run.cost == limit)  # for one that adds no row
        if not needs_last and kind and not has_room:
            yield Microbatch(run.samples, kind)
            runs[kind], has_learned = _Run(cost, shares=shares), True
    idle, learning = runs[False].samples, runs[True].samples
    if not learning and not has_learned:  # else the last run of a kind ends here
        idle, learning = _with_shortest_apart(idle)
    if idle:
        yield Microbatch(idle, False)
    if learning:
        yield Microbatch(learning, True, is_last=True)


def even_microbatches(
    samples: Iterable[Sample], num: int, learns: Callable[[Sample], bool], *, shares: bool = False
) -> Iterator[Microbatch]:
    """Divide samples into `num` micro-batches with nearly equal numbers of rows, or one for each if they are fewer.

    The longest sample goes first, each to the micro-batch that has the fewest rows so far, where each sample counts
    with all of its rows: it is a matter of lengths which samples of a group meet and share some. Samples without a
    gradient are apart, as in `microbatches`, in micro-batches with at most as many rows. All samples are waited for.
    """
    known = list(samples)
    idle, learning = [s for s in known if not learns(s)], [s for s in known if learns(s)]
    if not learning:
        idle, learning = _with_shortest_apart(idle)
    parts: list[list[int]] = [[] for _ in range(min(num, len(learning)))]
    sizes = [0] * len(parts)
    for index in sorted(range(len(learning)), key=lambda one: -learning[one].num_rows):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(index)
        sizes[smallest] += learning[index].num_rows
    for run in microbatches(idle, max(sizes), rows_of, lambda _: True, shares=shares) if idle else ():
        yield Microbatch(run.samples, False)
    for at, part in enumerate(parts):
        yield Microbatch([learning[index] for index in sorted(part)], True, is_last=at + 1 == len(parts))


def minibatches(samples: Iterable[Sample], num: int) -> list[list[Sample]]:
    """Divide a step's samples, in order, into `num` parts with as many whole groups each. All samples are waited for.

    Raises ValueError where the number of groups does not divide by it.
    """
    known = list(samples)
    groups = sorted({sample.group for sample in known})
    size, rest = divmod(len(groups), num)
    if rest or not size:
        raise ValueError(f"{len(groups)} groups of samples do not divide into {num} mini-batches")
    parts: list[list[Sample]] = [[] for _ in range(num)]
    place = {group: at // size for at, group in enumerate(groups)}
    for sample in known:
        parts[place[sample.group]].append(sample)
    return parts


def rows_of(sample: Sample, num_rows: int) -> float:
    """Return the cost of a sample where rows are limited: those that it adds, or its logits, if they are more."""
    return max(num_rows, len(sample.targets))


def whole(cost: Cost) -> Cost:
    """Return the cost of samples with all of their rows, also those that others have already: recurrent layers keep
    something for each of them."""
    return lambda sample, _: cost(sample, sample.num_rows)


def _with_shortest_apart(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Divide samples into all but the shortest, and the shortest."""
    if not samples:
        return [], []
    at = min(range(len(samples)), key=lambda index: samples[index].num_rows)
    return samples[:at] + samples[at + 1 :], [samples[at]]
