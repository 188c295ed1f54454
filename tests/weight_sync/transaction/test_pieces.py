"""An update whose tensors come in pieces is counted, checked and undone piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.rollout.sharding.shards import Shard
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.flat_bytes import add_range, remove_range
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction


@dataclass(frozen=True)
class Named:
    """A piece; see `layout.pieces.Piece`."""

    name: str
    whole: str
    shape: tuple[int, ...]
    offset: int


class Experts:
    """The rows of a stack, one name each, and another name of all of `norm`."""

    def __init__(self, num_experts: int, shape: tuple[int, ...]) -> None:
        size = math.prod(shape)
        self._rows = [Named(f"expert.{n}", "experts", shape, n * size) for n in range(num_experts)]
        self._by_name = {piece.name: piece for piece in self._rows} | {"old.norm": Named("old.norm", "norm", (8,), 0)}

    def piece(self, name: str) -> Named | None:
        if name == "expert.turned":
            raise ValueError("expert.turned: would have to be turned")
        return self._by_name.get(name)

    def siblings(self, name: str) -> Sequence[Named]:
        return self._rows if name in {piece.name for piece in self._rows} else ()


def model() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("experts", (4, 3, 5)), ("norm", (8,)))}


def open_on(tensors: dict[str, Tensor], **options: object) -> WeightTransaction:
    return WeightTransaction(tensors.items(), pieces=Experts(4, (3, 5)), **options)  # type: ignore[arg-type]


def noise(seed: int, *shape: int) -> Tensor:
    return byte_view(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensors[name], others[name]) for name in tensors)


def write_experts(transaction: WeightTransaction, numbers: Iterable[int]) -> None:
    for number in numbers:
        transaction.expect([TensorSpec(f"expert.{number}", torch.float32, (3, 5))])
        transaction.write(f"expert.{number}", 0, noise(number, 3, 5))


def test_ranges_are_removed_again():
    ranges = add_range(add_range((), 0, 8), 12, 20)
    assert remove_range(ranges, 4, 14) == ((0, 4), (14, 20))
    assert remove_range(ranges, 8, 12) == remove_range(ranges, 5, 5) == ranges
    assert remove_range(ranges, 0, 99) == ()


def test_pieces_make_a_tensor_whole_and_what_lacks_is_named():
    tensors = model()
    transaction = open_on(tensors)
    write_experts(transaction, (3, 0))
    lent = transaction.destination("expert.1", 0, 60)
    assert lent is not None and lent.data_ptr() == tensors["experts"][1].data_ptr()
    lent.copy_(noise(1, 3, 5))
    assert transaction.unwritten(["expert.3", "expert.2"]) == {"expert.2": ((0, 60),)}
    assert transaction.missing() == {"expert.2": ((0, 60),), "norm": ((0, 32),)}
    transaction.write("expert.2", 0, noise(2, 3, 5)[:20])
    assert transaction.missing()["expert.2"] == ((20, 60),)
    with pytest.raises(ValueError, match=r"2 tensors were not wholly written: expert.2 bytes \[20, 60\) of 60; norm"):
        transaction.commit()
    transaction.write("expert.2", 20, noise(2, 3, 5)[20:])
    transaction.write("old.norm", 0, noise(9, 8))
    assert transaction.written_names() == ("experts", "norm")
    assert set(transaction.written_units()) == {"expert.0", "expert.1", "expert.2", "expert.3", "norm"}
    transaction.commit()
    assert all(torch.equal(byte_view(tensors["experts"][n]), noise(n, 3, 5)) for n in range(4))
    transaction.revert()
    assert equal(tensors, model())


def test_announced_pieces_that_do_not_fit_are_all_named():
    tensors = model()
    transaction = open_on(tensors)
    write_experts(transaction, [3])
    specs = [
        TensorSpec("expert.0", torch.float32, (5, 3)),
        TensorSpec("expert.1", torch.float16, (3, 5)),
        TensorSpec("expert.2", torch.float32, (3, 5)),
        TensorSpec("expert.2", torch.float32, (3, 5)),
        TensorSpec("expert.3", torch.float32, (3, 5)),
        TensorSpec("expert.4", torch.float32, (3, 5)),
        TensorSpec("expert.turned", torch.float32, (3, 5)),
        *specs_of(tensors.items()),
        TensorSpec("old.norm", torch.float32, (8,)),
    ]
    with pytest.raises(ValueError) as error:
        transaction.expect(specs)
    for part in (
        "expert.0: shape [5, 3], resident [3, 5]",
        "expert.1: dtype float16, resident float32",
        "expert.2: named more than once",
        "expert.3: written already",
        "expert.4: not a tensor of this model",
        "expert.turned: would have to be turned",
        "experts: some of its bytes were written already as expert.3",
        "expert.0: its bytes are also those of experts",
        "expert.2: its bytes are also those of experts",
        "old.norm: its bytes are also those of norm",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_bytes_that_came_as_a_piece_are_refused_as_the_whole_and_the_other_way_round(coverage):
    one, other = open_on(model(), coverage=coverage), open_on(model(), coverage=coverage)
    write_experts(one, [2])
    other.write("experts", 0, noise(5, 4, 3, 5))
    for call in (
        lambda: one.expect([TensorSpec("experts", torch.float32, (4, 3, 5))]),
        lambda: one.write("experts", 0, noise(5, 4, 3, 5)),
        lambda: one.destination("experts", 0, 240),
        lambda: other.expect([TensorSpec("expert.2", torch.float32, (3, 5))]),
        lambda: other.write("expert.2", 0, noise(2, 3, 5)),
        lambda: other.destination("expert.2", 0, 60),
    ):
        with pytest.raises(ValueError, match=r"experts?(\.2)?: some of its bytes were written already as experts?"):
            call()
    assert one.num_writes == other.num_writes == 1


def test_the_next_update_of_a_partial_session_may_write_the_same_bytes_under_another_name():
    tensors = model()
    transaction = open_on(tensors, coverage="partial")
    write_experts(transaction, range(4))
    transaction.start_update()
    transaction.write("experts", 0, noise(5, 4, 3, 5))
    assert transaction.written_units() == ("experts",)
    transaction.start_update()
    write_experts(transaction, [1])
    assert transaction.written_units() == ("experts", "expert.1") and transaction.missing() == {"norm": ((0, 32),)}
    transaction.commit()
    assert torch.equal(byte_view(tensors["experts"][1]), noise(1, 3, 5))
    transaction.revert()
    assert equal(tensors, model())


def test_a_piece_is_restored_alone_and_counts_as_not_written():
    tensors, before = model(), model()
    transaction = open_on(tensors)
    write_experts(transaction, range(4))
    transaction.write("norm", 0, noise(9, 8))
    transaction.restore(["expert.2"])
    assert torch.equal(tensors["experts"][2], before["experts"][2])
    assert torch.equal(byte_view(tensors["experts"][3]), noise(3, 3, 5))
    assert transaction.missing() == {"expert.2": ((0, 60),)} and not transaction.has_written("expert.2")
    write_experts(transaction, [2])
    transaction.commit()
    transaction.revert()
    assert equal(tensors, before)


def test_changes_of_pieces_are_refused_by_name():
    tensors = model()
    transaction = open_on(tensors)
    with pytest.raises(ValueError, match=r"expert\.1: changes are applied to whole tensors: send those of experts"):
        transaction.write_elements("expert.1", torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"expert\.1: changes are applied to whole tensors"):
        transaction.held("expert.1")
    transaction.write_elements("old.norm", torch.tensor([3]), torch.tensor([7.0]))
    assert tensors["norm"][3] == 7 and transaction.unwritten(["old.norm"]) == {} and transaction.num_writes == 1


def test_tied_tensors_are_compared_where_one_comes_in_pieces():
    tensors = model()
    transaction = open_on(tensors, aliases={"tied": "experts"})
    transaction.write("tied", 0, torch.cat([noise(n, 3, 5) for n in range(4)]))
    write_experts(transaction, range(3))
    with pytest.raises(ValueError, match=r"expert\.3 and tied are one tensor here, but the update has different bytes"):
        transaction.write("expert.3", 0, noise(5, 3, 5))


@pytest.mark.parametrize(
    "shard",
    [
        Shard((4, 3, 5), 1, ((0, 1), (2, 3))),
        Shard((4, 3, 5), 2, ((1, 3),)),
        Shard((4, 3, 5), 0, ((1, 2), (3, 4))),
    ],
)
def test_a_rank_keeps_its_part_of_each_piece(shard):
    ranges = [slice(start, stop) for start, stop in shard.ranges]

    def part_of(whole: Tensor) -> Tensor:
        before = (slice(None),) * shard.dim
        return torch.cat([whole[(*before, one)] for one in ranges], dim=shard.dim)

    tensors = model()
    before = part_of(tensors["experts"]).clone()
    tensors["experts"] = before.clone()
    transaction = open_on(tensors, shards={"experts": shard})
    write_experts(transaction, range(4))
    new = torch.cat([noise(n, 3, 5) for n in range(4)]).view(torch.float32).view(4, 3, 5)
    assert torch.equal(tensors["experts"], part_of(new)) and transaction.missing() == {"norm": ((0, 32),)}
    transaction.restore(["expert.1"])
    mixed, old = new.clone(), model()["experts"]
    mixed[1] = old[1]
    assert torch.equal(tensors["experts"], part_of(mixed))
    transaction.rollback()
    assert torch.equal(tensors["experts"], before)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("piece"), st.integers(0, 3)),
        st.tuples(st.just("whole"), st.just(0)),
        st.tuples(st.just("elements"), st.lists(st.integers(0, 59), unique=True).map(tuple)),
        st.tuples(st.just("restore"), st.integers(0, 4)),
    ),
    max_size=12,
)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_whatever_came_in_which_order_restored_pieces_and_rolled_back_tensors_have_their_old_bytes(steps):
    tensors, before = model(), model()
    expected, unwritten = before["experts"].clone(), set(range(60))
    transaction = open_on(tensors, coverage="partial")
    for seed, (kind, value) in enumerate(steps):
        transaction.start_update()
        if kind == "piece":
            transaction.write(f"expert.{value}", 0, noise(seed, 3, 5))
            expected[value] = noise(seed, 3, 5).view(torch.float32).view(3, 5)
            unwritten -= set(range(15 * value, 15 * value + 15))
        elif kind == "whole":
            transaction.write("experts", 0, noise(seed, 4, 3, 5))
            expected, unwritten = noise(seed, 4, 3, 5).view(torch.float32).view(4, 3, 5).clone(), set()
        elif kind == "elements":
            positions = torch.tensor(value, dtype=torch.int64)
            transaction.write_elements("experts", positions, torch.full((len(value),), float(seed)))
            expected.view(-1)[positions] = float(seed)
            unwritten = set()
        else:
            name, rows = ("experts", slice(None)) if value == 4 else (f"expert.{value}", slice(value, value + 1))
            transaction.restore([name])
            expected[rows] = before["experts"][rows]
            unwritten |= set(range(60)[15 * (rows.start or 0) : 15 * (rows.stop or 4)])
        assert torch.equal(tensors["experts"], expected)
        missing = set[int]()
        for name, ranges in transaction.missing().items():
            first = 60 * int(name[-1]) if name[-1].isdigit() else 0
            missing |= {first + byte for a, b in ranges for byte in range(a, b) if name != "norm"}
        assert {byte // 4 for byte in missing} == unwritten
    transaction.rollback()
    assert equal(tensors, before)
