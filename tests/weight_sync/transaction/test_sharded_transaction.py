"""Updates of a sharded model: whole tensors arrive, each rank keeps, undoes and digests its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.rollout.sharding.shards import Shard
from lockstep.tests.support.covering import covering
from lockstep.weight_sync.delta.apply import apply_delta
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.digests.model_digest import model_root, tensor_roots
from lockstep.weight_sync.digests.shard_digest import local_digests, merged_roots, require_whole_cells
from lockstep.weight_sync.disk.folder import load_folder, save_folder
from lockstep.weight_sync.errors import DigestMismatch
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.shard_bytes import ShardBytes
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.shard_sync import plan_shard_sync
from lockstep.weight_sync.transaction.transaction import WeightTransaction


def model(seed: int) -> dict[str, Tensor]:
    """Make tensors that are cut by columns and rows, packed gate|up, two KV heads for four ranks, experts, a vector,
    and tensors that are not cut."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "embed": random(64, 48),
        "q": random(64, 48),
        "k": random(32, 48),
        "gate_up": random(192, 48),
        "down": random(48, 96, dtype=torch.float32),
        "experts": random(4, 64, 48),
        "bias": random(64, dtype=torch.float32),
        "norm": random(48),
        "late_norm": random(48),
        "scale": random(dtype=torch.float32),
    }


def cut(size: int, rank: int, ways: int) -> tuple[int, int]:
    return rank * size // ways, (rank + 1) * size // ways


def shards_of(rank: int, ways: int) -> dict[str, Shard]:
    """Return the parts of a rank of `ways` tensor-parallel ones."""
    head = rank * 2 // ways if ways > 2 else None  # of two KV heads: each is held by ways / 2 ranks
    gate, up = cut(96, rank, ways), tuple(96 + edge for edge in cut(96, rank, ways))
    half, other = cut(32, rank, ways), tuple(32 + edge for edge in cut(32, rank, ways))
    return {
        "embed": Shard((64, 48), 0, (cut(64, rank, ways),)),
        "q": Shard((64, 48), 0, (cut(64, rank, ways),)),
        "k": Shard((32, 48), 0, (cut(32, rank, ways) if head is None else cut(32, head, 2),)),
        "gate_up": Shard((192, 48), 0, (gate, up)),
        "down": Shard((48, 96), 1, (cut(96, rank, ways),)),
        "experts": Shard((4, 64, 48), 1, (half, other)),
        "bias": Shard((64,), 0, (cut(64, rank, ways),)),
        "norm": Shard.whole((48,)),
        "late_norm": Shard.whole((48,)),
        "scale": Shard.whole(()),
    }


def part_of(tensor: Tensor, shard: Shard) -> Tensor:
    if not shard.full_shape:
        return tensor.clone()
    return torch.cat([tensor.narrow(shard.dim, a, b - a) for a, b in shard.ranges], shard.dim).clone()


SECOND_STAGE = ("down", "experts", "late_norm", "scale")


@dataclass
class Rank:
    """One rank's part of the model."""

    tensors: dict[str, Tensor]
    shards: dict[str, Shard]
    elsewhere: tuple[TensorSpec, ...]

    def transaction(self, **options: object) -> WeightTransaction:
        return WeightTransaction(self.tensors.items(), shards=self.shards, elsewhere=self.elsewhere, **options)

    def bits(self) -> dict[str, bytes]:
        return {name: byte_view(tensor).numpy().tobytes() for name, tensor in self.tensors.items()}


def replica(full: Mapping[str, Tensor], tp: int, pp: int) -> list[Rank]:
    ranks = []
    for stage in range(pp):
        for rank in range(tp):
            names = [name for name in full if pp == 1 or (name in SECOND_STAGE) == bool(stage)]
            shards = shards_of(rank, tp)
            own = {name: part_of(full[name], shards[name]) for name in names}
            elsewhere = specs_of((name, tensor) for name, tensor in full.items() if name not in own)
            ranks.append(Rank(own, {name: shards[name] for name in names}, elsewhere))
    return ranks


def digest_of(ranks: Sequence[Rank], full: Mapping[str, Tensor]) -> str:
    contributions = [local_digests(rank.tensors, rank.shards) for rank in ranks]
    return model_root(merged_roots(specs_of(full.items()), contributions).items())


def holds(ranks: Sequence[Rank], full: Mapping[str, Tensor]) -> bool:
    return all(
        byte_view(tensor).equal(byte_view(part_of(full[name], rank.shards[name])))
        for rank in ranks
        for name, tensor in rank.tensors.items()
    )


def send(full: Mapping[str, Tensor], transaction: WeightTransaction, piece_bytes: int) -> None:
    """Send as a transport does: ranges of whole tensors, into lent memory where the sink lends it."""
    transaction.expect(specs_of(full.items()))
    for name, tensor in full.items():
        data = byte_view(tensor)
        for start in range(0, data.numel(), piece_bytes):
            piece = data[start : start + piece_bytes]
            lent = transaction.destination(name, start, piece.numel())
            if lent is None:
                transaction.write(name, start, piece)
            else:
                lent.copy_(piece)


LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
each_layout = pytest.mark.parametrize(("tp", "pp"), LAYOUTS)


# -- whole updates ----------------------------------------------------------------------------------------------------


@each_layout
@pytest.mark.parametrize("piece_bytes", [64, 192, 1 << 20])
def test_every_rank_keeps_its_part_of_a_full_update_and_the_digest_is_that_of_one_rank(tp, pp, piece_bytes):
    old, new = model(1), model(2)
    ranks = replica(old, tp, pp)
    assert digest_of(ranks, old) == model_root(tensor_roots(old.items()).items())
    for rank in ranks:
        transaction = rank.transaction()
        send(new, transaction, piece_bytes)
        transaction.commit()
    assert holds(ranks, new)
    assert digest_of(ranks, new) == model_root(tensor_roots(new.items()).items())


@each_layout
def test_a_rollback_puts_every_rank_back_and_keeps_no_more_than_what_it_holds(tp, pp):
    old, new = model(1), model(2)
    for rank in replica(old, tp, pp):
        before, transaction = rank.bits(), rank.transaction()
        send(new, transaction, 640)
        held_bytes = sum(tensor.nbytes for tensor in rank.tensors.values())
        padding = 64 * sum(-(-tensor.nbytes // 640) for tensor in new.values())
        assert transaction.num_undo_bytes <= held_bytes <= transaction.num_undo_bytes + padding
        transaction.rollback()
        assert transaction.state == "rolled_back" and rank.bits() == before


def test_coverage_is_that_of_the_whole_model_on_every_rank():
    old, new = model(1), model(2)
    for rank in replica(old, 2, 2):
        before, transaction = rank.bits(), rank.transaction()
        send({name: tensor for name, tensor in new.items() if name not in ("down", "q")}, transaction, 640)
        with pytest.raises(ValueError, match="2 tensors were not wholly written") as error:
            transaction.commit()
        assert "down" in str(error.value) and "q" in str(error.value)  # also where the rank holds neither
        transaction.rollback()
        assert rank.bits() == before


def test_a_tensor_of_which_one_rank_got_its_own_bytes_only_is_torn_on_all():
    new = model(2)
    for rank in replica(model(1), 2, 1):
        transaction = rank.transaction(coverage="partial")
        transaction.write("q", 0, byte_view(new["q"])[: 32 * 48 * 2])  # all rows of the first of two ranks
        with pytest.raises(ValueError, match="q bytes"):
            transaction.commit()


def test_expect_compares_with_the_whole_shape_and_knows_the_names_of_other_stages():
    first, second = replica(model(1), 1, 2)
    for rank in (first, second):
        transaction = rank.transaction()
        transaction.expect(specs_of(model(2).items()))
        with pytest.raises(ValueError, match=r"down: shape \[48, 48\], resident \[48, 96\].*nobody"):
            transaction.expect([TensorSpec("down", torch.float32, (48, 48)), TensorSpec("nobody", torch.float32, (1,))])


def test_memory_is_lent_only_where_a_range_is_one_piece_of_what_the_rank_holds():
    first, second = replica(model(1), 2, 1)
    row = 48 * 2
    for rank, owner in ((first, 0), (second, 1)):
        transaction = rank.transaction(coverage="partial")
        lent = transaction.destination("q", owner * 32 * row, 32 * row)
        assert lent is not None and lent.data_ptr() == rank.tensors["q"].data_ptr()
        assert transaction.destination("q", 31 * row, 2 * row) is None  # crosses the edge between two parts
        assert transaction.destination("q", (1 - owner) * 32 * row, 64) is None  # the other rank's
        assert transaction.destination("down", 0, 96 * 4) is None  # a row of a tensor that is cut across
        assert transaction.destination("norm", 0, 96) is not None


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_ranges_of_any_cut_land_where_they_belong(data):
    rows, size, inner = (data.draw(st.integers(1, n)) for n in (4, 9, 3))
    edges = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=6, unique=True)))
    ranges = tuple(zip(edges[::2], edges[1::2], strict=False))
    shard = Shard((rows, size, inner), 1, ranges)
    old = torch.randint(0, 2**15, shard.full_shape, dtype=torch.int16)
    new = torch.randint(0, 2**15, shard.full_shape, dtype=torch.int16)
    held, expected = ShardBytes("t", part_of(old, shard), shard), old.clone()
    for _ in range(data.draw(st.integers(1, 3))):
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, old.numel())] * 2)))
        piece = byte_view(new)[2 * start : 2 * stop]
        held.write(2 * start, piece)
        expected.view(-1)[start:stop] = new.view(-1)[start:stop]
        first, last = held.local_range(2 * start, 2 * stop)
        marks = torch.zeros(old.numel(), dtype=torch.int16)
        marks[start:stop] = 1
        inside = part_of(marks.view(shard.full_shape), shard).view(-1)
        assert inside.nonzero().view(-1).tolist() == list(range(first // 2, last // 2))
        assert held.agrees_with(2 * start, piece)
        assert held.holds_all_of(2 * start, 2 * stop) == (last - first == 2 * (stop - start))
        back = held.read(2 * start, torch.zeros_like(piece))
        again = ShardBytes("t", torch.zeros_like(held.local.tensor), shard)
        again.write(2 * start, back)
        assert again.agrees_with(2 * start, piece)
    assert torch.equal(held.local.tensor, part_of(expected, shard))
    positions = torch.randperm(old.numel())[: data.draw(st.integers(0, old.numel()))]
    here, local = held.local_elements(positions)
    assert torch.equal(held.local.take(local), expected.view(-1)[positions[here]])
    assert len(held.local.take(local)) == sum(
        any(a <= (p // inner) % size < b for a, b in ranges) for p in positions.tolist()
    )


def test_parts_that_do_not_fit_their_shard_are_refused():
    whole = torch.zeros(8, 6)
    for part, shard, why in (
        (whole[:3], Shard((8, 6), 0, ((0, 4),)), "the part is"),
        (whole[:, :3], Shard((8, 6), 1, ((0, 3),)), "not contiguous"),
        (whole[:4], Shard((8, 6), 0, ((4, 6), (0, 2))), "not in order"),
        (whole[:4], Shard((8, 6), 0, ((6, 10),)), "not in order"),
    ):
        with pytest.raises(ValueError, match=why):
            WeightTransaction([("t", part)], shards={"t": shard})


# -- transports -------------------------------------------------------------------------------------------------------


@each_layout
def test_a_folder_is_read_by_every_rank(tp, pp, tmp_path):
    old, new = model(1), model(2)
    manifest = save_folder(tmp_path / "checkpoint", new.items())
    ranks = replica(old, tp, pp)
    for rank in ranks:
        transaction = rank.transaction()
        load_folder(tmp_path / "checkpoint", transaction)
        transaction.commit()
    assert holds(ranks, new) and digest_of(ranks, new) == manifest.model_digest


def few_changes(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with changes in some elements of most tensors, most of one tensor, none of another."""
    new = {name: tensor.clone() for name, tensor in full.items()}
    for name in ("embed", "q", "k", "gate_up", "down", "experts", "bias"):
        flat = new[name].view(-1)
        at = torch.arange(0, flat.numel(), 23)
        flat[at] = flat[at] * 1.5 + 1
    new["late_norm"] = torch.randn(48).to(torch.bfloat16)
    return new


@each_layout
@covering(1, rest="slow", chunk_bytes=[1024, 4 << 20], check=["touched", "pre", "pre+post"])
def test_a_delta_changes_on_each_rank_what_it_holds_of_it(tp, pp, check, chunk_bytes):
    old = model(1)
    new = few_changes(old)
    chunks = list(encode_delta(old, new.items(), chunk_bytes=chunk_bytes))
    ranks = replica(old, tp, pp)
    unchecked = set()
    for rank in ranks:
        transaction = rank.transaction()
        apply_delta(specs_of(new.items()), chunks, transaction, check=check)
        unchecked |= set(transaction.unchecked())
        transaction.commit()
    assert holds(ranks, new)
    assert digest_of(ranks, new) == model_root(tensor_roots(new.items()).items())
    # A tensor that is cut cannot be checked chunk by chunk, and the transaction records this.
    cut_tensors = {"embed", "q", "k", "gate_up", "down", "experts", "bias"} if tp > 1 else set()
    assert unchecked <= cut_tensors and (tp == 1) == (not unchecked)
    if tp > 1 and chunk_bytes > 1024:
        assert unchecked == cut_tensors


def test_a_delta_is_undone_on_every_rank():
    old = model(1)
    new = few_changes(old)
    chunks = list(encode_delta(old, new.items()))
    for rank in replica(old, 2, 2):
        before, transaction = rank.bits(), rank.transaction()
        apply_delta(specs_of(new.items()), chunks, transaction)
        transaction.rollback()
        assert rank.bits() == before


def test_a_delta_on_the_wrong_base_is_refused_where_a_rank_can_tell_and_else_left_to_the_digest():
    old, other = model(1), model(3)
    new = few_changes(old)
    chunks = {c.header.name: c for c in encode_delta(old, new.items())}
    for rank in replica(other, 2, 1):
        transaction = rank.transaction(coverage="partial")
        norm = TensorSpec.of("norm", new["norm"])
        with pytest.raises(DigestMismatch, match="neither the delta's base nor its result"):
            apply_delta([norm], [chunks["norm"]], transaction)
        apply_delta([TensorSpec.of("down", new["down"])], [chunks["down"]], transaction)
        assert list(transaction.unchecked()) == ["down"]


# -- digests ----------------------------------------------------------------------------------------------------------


def test_ranks_that_hold_the_same_bytes_differently_are_found():
    full = model(1)

    def roots_with(change: Callable[[list[Rank]], None], tp: int) -> set[str]:
        ranks = replica(full, tp, 1)
        change(ranks)
        contributions = [local_digests(rank.tensors, rank.shards) for rank in ranks]
        return set(full) - set(merged_roots(specs_of(full.items()), contributions))

    def corrupt_norm(ranks: list[Rank]) -> None:
        ranks[1].tensors["norm"][0] += 1

    def corrupt_kv_head(ranks: list[Rank]) -> None:
        ranks[1].tensors["k"][0, 0] += 1

    assert roots_with(lambda ranks: None, 4) == set()
    assert roots_with(corrupt_norm, 2) == {"norm"}
    assert roots_with(corrupt_kv_head, 4) == {"k"}  # four ranks share two heads
    assert roots_with(corrupt_kv_head, 2) == set()  # no other rank holds it: it is another model


def test_a_rank_that_is_missing_is_named_by_what_is_not_there():
    full = model(1)
    ranks = replica(full, 2, 1)
    with pytest.raises(ValueError, match=r"the ranks do not hold these together: .*q: .*missing tiles"):
        merged_roots(specs_of(full.items()), [local_digests(ranks[0].tensors, ranks[0].shards)])


def test_cuts_that_no_rank_could_hash_are_listed():
    for ways in (2, 4):
        for rank in range(ways):
            require_whole_cells(shards_of(rank, ways))
    thirds = {"q": Shard((48, 6), 0, ((0, 16),)), "o": Shard((6, 48), 1, ((16, 32),)), "norm": Shard.whole((48,))}
    with pytest.raises(ValueError, match=r"q \[48, 6\]: \[\(0, 16\)\] of dim 0, cells of 3.*o \[6, 48\]"):
        require_whole_cells(thirds)


# -- in place ---------------------------------------------------------------------------------------------------------


def test_a_trainer_that_has_everything_is_copied_from_and_one_that_is_cut_alike_lends_its_storage():
    old, new = model(1), model(2)
    for tp, pp in LAYOUTS[1:]:
        ranks = replica(old, tp, pp)
        copied = [plan_shard_sync(rank.tensors.items(), rank.shards, new.items()).run() for rank in ranks]
        assert holds(ranks, new)
        assert [c.bytes_copied for c in copied] == [
            0 if tp == 1 else sum(t.nbytes for t in rank.tensors.values()) for rank in ranks
        ]
    for rank, trainer in zip(replica(old, 2, 1), replica(new, 2, 1), strict=True):
        assert plan_shard_sync(rank.tensors.items(), rank.shards, trainer.tensors.items()).run().bytes_copied == 0
        assert all(t.data_ptr() == trainer.tensors[name].data_ptr() for name, t in rank.tensors.items())


def test_a_trainer_that_does_not_fit_is_refused_with_all_names_and_nothing_changes():
    rank = replica(model(1), 2, 1)[0]
    before, new = rank.bits(), model(2)
    new["q"], new["norm"] = new["q"][:5], new["norm"].float()
    del new["bias"]
    with pytest.raises(ValueError, match="not this rank's part") as error:
        plan_shard_sync(rank.tensors.items(), rank.shards, new.items())
    for part in ("q: the trainer has bfloat16[5, 48]", "norm: the trainer has float32[48]", "bias: the trainer does"):
        assert part in str(error.value)
    assert rank.bits() == before
