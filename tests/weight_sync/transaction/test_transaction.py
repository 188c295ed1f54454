"""A transaction over resident tensors takes effect whole, or every resident byte is unchanged."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.weight_sync.errors import Poisoned, SessionError
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.layout.flat_bytes import add_range, gaps, overlaps, overlaps_itself
from lockstep.weight_sync.manifest import TensorSpec, specs_of
from lockstep.weight_sync.transaction.transaction import WeightTransaction
from lockstep.weight_sync.transaction.undo import UndoArena

DTYPES = sorted(
    (
        value
        for value in {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
        if not str(value).startswith(("torch.q", "torch.quint"))
    ),
    key=str,
)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def model() -> dict[str, torch.Tensor]:
    """Make tensors: contiguous, transposed, a column slice of a fused tensor, a scalar, an empty one, one-byte and
    16-byte ones."""
    return {
        "plain": tensor_of(torch.bfloat16, (9, 32), 1),
        "turned": tensor_of(torch.float32, (7, 5), 2).t(),
        "sliced": tensor_of(torch.float16, (6, 10, 4), 3)[:, 2:7],
        "scalar": tensor_of(torch.float64, (), 4),
        "empty": tensor_of(torch.float32, (0, 3), 5),
        "fp8": tensor_of(torch.float8_e4m3fn, (70,), 6),
        "wide": tensor_of(torch.complex128, (3, 4), 7).t(),
    }


def snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: byte_view(tensor).numpy().tobytes() for name, tensor in tensors.items()}


def noise(tensor: torch.Tensor, seed: int = 99) -> torch.Tensor:
    return byte_view(tensor_of(tensor.dtype, tuple(tensor.shape), seed))


def write_all(transaction: WeightTransaction, tensors: dict[str, torch.Tensor], seed: int = 99) -> None:
    for name, tensor in tensors.items():
        transaction.write(name, 0, noise(tensor, seed))


@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_a_tensor_whose_elements_share_memory_is_refused_and_the_others_are_restored(coverage):
    tensors = model()
    before, shared = snapshot(tensors), torch.ones(1).expand(5)
    transaction = WeightTransaction(tensors.items(), optional=[("shared", shared)], coverage=coverage)
    write_all(transaction, tensors)
    refused = "shared: elements of the resident tensor share memory"
    with pytest.raises(ValueError, match=refused):
        transaction.expect([TensorSpec("shared", torch.float32, (5,))])
    with pytest.raises(ValueError, match=refused):
        transaction.write("shared", 0, byte_view(torch.zeros(5)))
    with pytest.raises(ValueError, match=refused):
        transaction.destination("shared", 0, 8)
    with pytest.raises(ValueError, match=refused):
        transaction.write_elements("shared", torch.tensor([1]), torch.tensor([2.0]))
    transaction.rollback()
    assert transaction.state == "rolled_back" and snapshot(tensors) == before and shared.tolist() == [1] * 5


def test_required_tensors_whose_elements_share_memory_are_named_before_an_update_of_all_begins():
    one, two = torch.ones(1, 4).expand(3, 4), torch.ones(9).unfold(0, 3, 1)
    required = [("plain", torch.ones(3)), ("one", one), ("two", two)]
    with pytest.raises(ValueError, match=r"^one, two: elements .* share memory"):
        WeightTransaction(required)
    transaction = WeightTransaction(required, coverage="partial")
    transaction.write("plain", 0, byte_view(torch.zeros(3)))
    transaction.commit()


def test_slices_turned_tensors_and_those_of_one_element_share_no_memory():
    whole = torch.zeros(2, 3, 4)
    apart = [whole, whole.permute(2, 0, 1), whole[:, 1:, ::2], whole[:1, :1, :1].expand(1, 1, 1), whole[:0].mT]
    assert not any(map(overlaps_itself, [*apart, *model().values()]))


# -- permitted writes -------------------------------------------------------------------------------------------------


def test_expect_lists_every_offender_and_changes_nothing():
    tensors = model()
    transaction = WeightTransaction(tensors.items())
    before = snapshot(tensors)
    transaction.write("fp8", 0, noise(tensors["fp8"]))
    specs = [
        TensorSpec("plain", torch.bfloat16, (9, 33)),
        TensorSpec("turned", torch.float16, (5, 7)),
        TensorSpec("nobody", torch.float16, (1,)),
        TensorSpec("scalar", torch.float64, ()),
        TensorSpec("scalar", torch.float64, ()),
        TensorSpec("fp8", torch.float8_e4m3fn, (70,)),
    ]
    with pytest.raises(ValueError) as error:
        transaction.expect(specs)
    for part in (
        "plain: shape [9, 33], resident [9, 32]",
        "turned: dtype float16, resident float32",
        "nobody: not a tensor",
        "scalar: named more than once",
        "fp8: written already",
    ):
        assert part in str(error.value)
    transaction.rollback()
    assert snapshot(tensors) == before


def test_a_transaction_of_partial_coverage_expects_what_it_has_written():
    tensors = model()
    transaction = WeightTransaction(tensors.items(), coverage="partial")
    write_all(transaction, tensors)
    transaction.expect(specs_of(tensors.items()))


@pytest.mark.parametrize(("offset", "num_bytes"), [(-64, 64), (0, 640), (576, 64), (1, 2), (0, 3)])
def test_ranges_outside_a_tensor_or_through_an_element_are_refused(offset, num_bytes):
    tensors = model()
    transaction = WeightTransaction(tensors.items())
    before = snapshot(tensors)
    with pytest.raises(ValueError, match="plain bfloat16"):
        transaction.write("plain", offset, torch.zeros(num_bytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="plain bfloat16"):
        transaction.destination("plain", offset, num_bytes)
    assert snapshot(tensors) == before and transaction.num_writes == 0


def test_a_full_update_writes_each_byte_once():
    tensors = model()
    transaction = WeightTransaction(tensors.items())
    transaction.write("plain", 64, torch.zeros(64, dtype=torch.uint8))
    assert transaction.destination("plain", 0, 64) is not None
    for start, size in ((0, 576), (64, 64), (0, 64)):
        with pytest.raises(ValueError, match="written already"):
            transaction.write("plain", start, torch.zeros(size, dtype=torch.uint8))
        with pytest.raises(ValueError, match="written already"):
            transaction.destination("plain", start, size)


def test_data_that_is_no_run_of_bytes_is_refused():
    transaction = WeightTransaction(model().items())
    with pytest.raises(ValueError, match=r"plain: data must be uint8 \[n\], not bfloat16\[9, 32\]"):
        transaction.write("plain", 0, torch.zeros(9, 32, dtype=torch.bfloat16))


def test_elements_that_do_not_fit_are_refused():
    tensors = model()
    transaction = WeightTransaction(tensors.items())
    before, one = snapshot(tensors), torch.zeros(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="positions 288 to 288"):
        transaction.write_elements("plain", torch.tensor([288]), one)
    with pytest.raises(ValueError, match="positions -1 to -1"):
        transaction.write_elements("plain", torch.tensor([-1]), one)
    with pytest.raises(ValueError, match="values are float16, resident bfloat16"):
        transaction.write_elements("plain", torch.tensor([0]), one.half())
    with pytest.raises(ValueError, match="values are int32"):
        transaction.write_elements("plain", torch.tensor([0]), one.int())
    with pytest.raises(ValueError, match="positions must be"):
        transaction.write_elements("plain", torch.tensor([0, 1]), one)
    assert snapshot(tensors) == before and transaction.num_writes == 0


def test_options_and_aliases_that_make_no_sense_are_all_named():
    a = torch.zeros(4)
    with pytest.raises(ValueError, match="coverage"):
        WeightTransaction([], coverage="most")
    with pytest.raises(ValueError, match="undo"):
        WeightTransaction([], undo="some")
    with pytest.raises(ValueError) as error:
        WeightTransaction(
            [("a", a), ("b", a), ("c", torch.zeros(1))],
            optional=[("c", torch.zeros(2))],
            aliases={"x": "gone", "a": "c"},
        )
    for part in ("b is the same memory as a", "c is named more than once", "alias x is of unknown gone", "alias a is"):
        assert part in str(error.value)


# -- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", ["write", "destination", "elements"])
@pytest.mark.filterwarnings("ignore")  # torch calls some dtypes experimental
def test_every_dtype_is_written_and_rolled_back(dtype, by):
    tensors = {"flat": tensor_of(dtype, (40,)), "turned": tensor_of(dtype, (6, 5), 2).t(), "one": tensor_of(dtype, ())}
    before = snapshot(tensors)
    transaction = WeightTransaction(tensors.items())
    for name, tensor in tensors.items():
        data = noise(tensor)
        lent = transaction.destination(name, 0, data.numel()) if by == "destination" else None
        if lent is not None:
            lent.copy_(data)
        elif by == "elements":
            positions = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(3))
            values = data.view(dtype) if dtype.itemsize == 16 else data.view(getattr(torch, f"int{8 * dtype.itemsize}"))
            transaction.write_elements(name, positions, values[positions])
        else:
            transaction.write(name, 0, data)
    assert snapshot(tensors) == {name: noise(t).numpy().tobytes() for name, t in tensors.items()} != before
    assert transaction.missing() == {}
    transaction.rollback()
    assert snapshot(tensors) == before and transaction.state == "rolled_back"


def test_commit_refuses_what_is_missing_with_the_full_list_and_stays_open():
    tensors = model()
    transaction = WeightTransaction(tensors.items(), optional=[("buffer", torch.zeros(3))])
    transaction.write("plain", 0, noise(tensors["plain"])[:64])
    transaction.write("plain", 128, noise(tensors["plain"])[128:])
    transaction.write("fp8", 0, noise(tensors["fp8"]))
    assert transaction.missing()["plain"] == ((64, 128),)
    with pytest.raises(ValueError) as error:
        transaction.commit()
    assert "plain bytes [64, 128) of 576" in str(error.value)
    assert all(name in str(error.value) for name in ("turned", "sliced", "scalar", "wide"))
    assert all(name not in str(error.value) for name in ("fp8", "buffer", "empty"))
    assert transaction.state == "open"
    transaction.write("plain", 64, noise(tensors["plain"])[64:128])
    for name in ("turned", "sliced", "scalar", "wide"):
        transaction.write(name, 0, noise(tensors[name]))
    transaction.commit()
    assert transaction.state == "committed"
    assert snapshot(tensors) == {name: noise(t).numpy().tobytes() for name, t in tensors.items()}


def test_a_tensor_written_in_part_is_torn_under_partial_coverage_too():
    tensors = model()
    transaction = WeightTransaction(tensors.items(), coverage="partial")
    transaction.write("scalar", 0, noise(tensors["scalar"]))
    transaction.write("plain", 0, noise(tensors["plain"])[:64])
    with pytest.raises(ValueError, match=r"1 tensors.*plain bytes \[64, 576\) of 576"):
        transaction.commit()
    transaction.write("plain", 64, noise(tensors["plain"])[64:])
    transaction.commit()
    assert transaction.written_names() == ("plain", "scalar")


def test_a_commit_can_be_reverted_until_its_undo_is_released():
    tensors = model()
    before = snapshot(tensors)
    transaction = WeightTransaction(tensors.items())
    write_all(transaction, tensors)
    with pytest.raises(SessionError, match="open"):
        transaction.release_undo()
    with pytest.raises(SessionError, match="open, not committed"):
        transaction.revert()
    transaction.commit()
    assert transaction.can_revert and transaction.num_undo_bytes == sum(t.nbytes for t in tensors.values())
    transaction.revert()
    assert snapshot(tensors) == before and transaction.state == "rolled_back"

    transaction = WeightTransaction(tensors.items())
    write_all(transaction, tensors)
    transaction.commit()
    after = snapshot(tensors)
    transaction.release_undo()
    assert not transaction.can_revert and transaction.num_undo_bytes == 0
    with pytest.raises(SessionError, match="not kept"):
        transaction.revert()
    assert snapshot(tensors) == after and transaction.state == "committed"


@pytest.mark.parametrize("state", ["committed", "rolled_back", "poisoned"])
def test_nothing_is_written_outside_the_open_state(state):
    tensors = model()
    undo = "none" if state == "poisoned" else "tensors"
    transaction = WeightTransaction(tensors.items(), coverage="partial", undo=undo)
    transaction.write("scalar", 0, noise(tensors["scalar"]))
    transaction.commit() if state == "committed" else transaction.rollback()
    assert transaction.state == state
    before = snapshot(tensors)
    data = torch.zeros(8, dtype=torch.uint8)
    for act in (
        lambda: transaction.write("scalar", 0, data),
        lambda: transaction.destination("scalar", 0, 8),
        lambda: transaction.write_elements("scalar", torch.tensor([0]), torch.zeros(1, dtype=torch.float64)),
        lambda: transaction.expect([]),
        lambda: transaction.restore(["scalar"]),
        transaction.start_update,
        transaction.rollback,
        transaction.commit,
    ):
        with pytest.raises(SessionError, match=f"the transaction is {state}"):
            act()
    assert snapshot(tensors) == before


def test_without_undo_giving_up_poisons_only_once_a_byte_was_overwritten():
    tensors = model()
    untouched = WeightTransaction(tensors.items(), undo="none")
    untouched.rollback()
    assert untouched.state == "rolled_back"

    transaction = WeightTransaction(tensors.items(), undo="none")
    transaction.write("scalar", 0, noise(tensors["scalar"]))
    assert transaction.num_undo_bytes == 0
    transaction.rollback()
    assert transaction.state == "poisoned"

    transaction = WeightTransaction(tensors.items(), undo="none")
    transaction.write_elements("scalar", torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(Poisoned, match="scalar cannot be restored"):
        transaction.restore(["scalar"])
    assert transaction.state == "poisoned"


def test_restored_tensors_are_the_old_ones_and_may_be_sent_again():
    tensors = model()
    before = snapshot(tensors)
    transaction = WeightTransaction(tensors.items())
    write_all(transaction, tensors, seed=50)
    transaction.restore(["plain", "wide"])
    now = snapshot(tensors)
    assert {name for name in tensors if now[name] == before[name]} == {"plain", "wide", "empty"}
    assert set(transaction.missing()) == {"plain", "wide"}
    undo_bytes = transaction.num_undo_bytes
    write_all(transaction, {name: tensors[name] for name in ("plain", "wide")})
    assert transaction.num_undo_bytes == undo_bytes
    transaction.commit()
    transaction.revert()
    assert snapshot(tensors) == before


def test_elements_overwritten_before_their_range_was_saved_come_back_after_a_restore_too():
    tensors = model()
    before = snapshot(tensors)
    transaction = WeightTransaction(tensors.items(), coverage="partial")
    for name in ("plain", "turned"):
        transaction.write_elements(name, torch.tensor([1, 33]), torch.ones(2, dtype=tensors[name].dtype))
        transaction.write(name, 0, noise(tensors[name]))
        transaction.restore([name])
        assert snapshot(tensors)[name] == before[name]
        transaction.write(name, 0, noise(tensors[name]))
    transaction.rollback()
    assert snapshot(tensors) == before


# -- tied tensors -----------------------------------------------------------------------------------------------------


def tied(coverage: str = "full") -> tuple[dict[str, torch.Tensor], WeightTransaction]:
    tensors = {"embed": tensor_of(torch.float32, (8, 8), 1)}
    return tensors, WeightTransaction(tensors.items(), aliases={"head": "embed"}, coverage=coverage)


@pytest.mark.parametrize(("first", "second"), [("embed", "head"), ("head", "embed")])
def test_equal_bytes_under_both_names_are_one_tensor(first, second):
    tensors, transaction = tied()
    data = noise(tensors["embed"])
    transaction.expect([TensorSpec("embed", torch.float32, (8, 8)), TensorSpec("head", torch.float32, (8, 8))])
    transaction.write(first, 0, data[:128])
    assert transaction.destination(second, 0, 256) is None
    transaction.write(second, 0, data)  # compares the first half, writes the second
    transaction.write(first, 128, data[128:])
    assert transaction.written_names() == ("embed",)
    assert transaction.unwritten(["embed", "head"]) == {}
    transaction.commit()
    assert torch.equal(byte_view(tensors["embed"]), data)


def test_different_bytes_under_both_names_are_an_error_that_names_both():
    tensors, transaction = tied()
    data = noise(tensors["embed"])
    transaction.write("embed", 0, data)
    other = data.clone()
    other[200] ^= 1
    before = transaction.num_writes
    with pytest.raises(ValueError, match="head and embed are one tensor"):
        transaction.write("head", 128, other[128:])
    with pytest.raises(ValueError, match="head and embed are one tensor"):
        transaction.write_elements("head", torch.tensor([50]), other.view(torch.float32)[50:51])
    assert torch.equal(byte_view(tensors["embed"]), data) and transaction.num_writes == before


def test_a_delta_under_both_names_is_applied_once():
    tensors, transaction = tied()
    old = tensors["embed"].clone()
    for name in ("head", "embed"):
        transaction.write_elements(name, torch.tensor([3, 9]), torch.tensor([1.0, 2.0]))
    transaction.commit()
    changed = (tensors["embed"] != old).flatten().nonzero().flatten().tolist()
    assert changed == [3, 9]


def test_a_fixed_tensor_takes_the_bytes_that_it_has_and_no_others():
    plain, table = torch.zeros(4), torch.arange(6.0)
    before = snapshot({"table": table})
    transaction = WeightTransaction([("plain", plain)], fixed=[("table", table)], coverage="partial")
    transaction.expect(specs_of([("table", table)]))
    assert transaction.destination("table", 0, 8) is None
    transaction.write("table", 8, byte_view(table)[8:])
    transaction.write_elements("table", torch.tensor([2]), torch.tensor([2.0]))
    for write in (
        lambda: transaction.write("table", 8, byte_view(table + 1)[8:]),
        lambda: transaction.write_elements("table", torch.tensor([2]), torch.tensor([7.0])),
    ):
        with pytest.raises(ValueError, match="table: no part of checkpoints"):
            write()
    assert snapshot({"table": table}) == before and not transaction.overwritten
    assert "table" not in transaction.missing()


def test_names_are_compared_within_one_update_only():
    tensors, transaction = tied("partial")
    for seed in (1, 2):
        transaction.start_update()
        for name in ("embed", "head"):
            transaction.write(name, 0, noise(tensors["embed"], seed))
    assert torch.equal(byte_view(tensors["embed"]), noise(tensors["embed"], 2))


# -- tensors that several updates write --------------------------------------------------------------------------------


def test_a_tensor_that_one_update_begins_and_another_ends_is_whole_in_the_latter():
    tensors, transaction = tied("partial")
    data = noise(tensors["embed"])
    for name, start, stop, absent in (("embed", 0, 96, ((96, 256),)), ("embed", 96, 256, ()), ("head", 0, 256, ())):
        transaction.start_update()
        transaction.write(name, start, data[start:stop])
        assert transaction.unwritten([name]) == ({name: absent} if absent else {})
        assert transaction.comparable([name], [TensorSpec(name, torch.float32, (8, 8))]) == ([] if absent else [name])
    transaction.start_update()
    assert transaction.unwritten(["embed"]) == {"embed": ((0, 256),)}  # this one has nothing of it
    transaction.commit()


def test_bytes_of_a_sender_that_was_lost_are_not_taken_for_those_of_the_next_one():
    tensors, transaction = tied("partial")
    data, spec = noise(tensors["embed"]), TensorSpec("embed", torch.float32, (8, 8))
    for start in (0, 64):  # the first sender is lost with its third bucket
        transaction.start_update()
        transaction.write("embed", start, noise(tensors["embed"], 1)[start : start + 64])
    for start in (0, 128, 192):  # the second one leaves out a bucket
        transaction.start_update()
        if start == 0:
            transaction.expect([spec])
        transaction.write("embed", start, data[start : start + 64])
    assert transaction.unwritten(["embed"]) == {"embed": ((64, 128),)}
    assert transaction.comparable(["embed"], [spec]) == []
    with pytest.raises(ValueError, match=r"embed bytes \[64, 128\) of 256"):
        transaction.commit()


# -- random interleavings ---------------------------------------------------------------------------------------------

NAMES = tuple(model())
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "destination", "elements", "restore", "start"]),
        st.sampled_from(NAMES),
        st.floats(0, 1),
        st.floats(0, 1),
        st.integers(0, 1000),
    ),
    max_size=25,
)


@given(STEPS, st.booleans())
@settings(max_examples=100, deadline=None)
def test_whatever_was_written_and_restored_every_byte_is_the_old_one_after_rollback(steps, commit_first):
    tensors = model()
    frame = {"the memory around a slice": tensors["sliced"]._base}
    before = snapshot(tensors | frame)
    mirror = {name: byte_view(tensor).clone() for name, tensor in tensors.items()}
    transaction = WeightTransaction(tensors.items(), coverage="partial")
    for action, name, a, b, seed in steps:
        tensor = tensors[name]
        size, count = tensor.itemsize, tensor.numel()
        low, high = sorted((int(a * count), int(b * count)))
        data = noise(tensor, seed)[low * size : high * size]
        if action == "restore":
            transaction.restore([name])
            mirror[name] = torch.frombuffer(bytearray(before[name]), dtype=torch.uint8) if count else mirror[name]
        elif action == "start":
            transaction.start_update()
        elif action == "elements":
            positions = torch.arange(low, high)[torch.randperm(high - low)][::2]
            transaction.write_elements(name, positions, noise(tensor, seed).view(tensor.dtype)[positions])
            if count:
                mirror[name].view(-1, size)[positions] = noise(tensor, seed).view(-1, size)[positions]
        else:
            lent = transaction.destination(name, low * size, data.numel()) if action == "destination" else None
            if lent is None:
                transaction.write(name, low * size, data)
            else:
                lent.copy_(data)
            mirror[name][low * size : high * size] = data
    assert snapshot(tensors) == {name: data.numpy().tobytes() for name, data in mirror.items()}
    if commit_first:
        with contextlib.suppress(ValueError):  # partly written tensors keep it open
            transaction.commit()
    transaction.revert() if transaction.state == "committed" else transaction.rollback()
    assert snapshot(tensors | frame) == before


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=12), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_byte_ranges_are_sets_of_bytes(added, split):
    ranges, members = (), set()
    for start, stop in added:
        ranges = add_range(ranges, start, stop)
        members |= set(range(start, stop))
    assert {i for a, b in ranges for i in range(a, b)} == members
    assert all(ranges[i][1] < ranges[i + 1][0] for i in range(len(ranges) - 1))
    assert {i for a, b in overlaps(ranges, split, 30) for i in range(a, b)} == {i for i in members if i >= split}
    assert {i for a, b in gaps(ranges, split, 30) for i in range(a, b)} == set(range(split, 30)) - members


def test_the_arena_hands_out_separate_aligned_memory():
    arena = UndoArena(chunk_bytes=4096)
    sizes = [0, 1, 100, 4000, 5000, 64, 0, 3]
    parts = [arena.allocate(size) for size in sizes]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.numel() for part in parts] == sizes and arena.num_bytes == sum(sizes)
    assert all(bool((part == value).all()) for value, part in enumerate(parts))
    assert all(part.data_ptr() % 64 == 0 for part in parts if part.numel())


def test_memory_of_an_undo_that_is_released_serves_the_next_one():
    size = 3 << 20
    first, second = UndoArena(chunk_bytes=size), UndoArena(chunk_bytes=size)
    address = first.allocate(size).data_ptr()
    assert second.allocate(size).data_ptr() != address
    first.release()
    third = UndoArena(chunk_bytes=size)
    assert third.allocate(size).fill_(7).data_ptr() == address
    assert (first.num_bytes, third.num_bytes) == (0, size)
    second.release()
    third.release()


def test_undo_of_elements_keeps_positions_and_values_only():
    tensors = {"big": torch.zeros(1 << 16, dtype=torch.bfloat16)}
    transaction = WeightTransaction(tensors.items())
    positions = torch.arange(0, 1 << 16, 64)
    transaction.write_elements("big", positions, torch.ones(positions.numel(), dtype=torch.bfloat16))
    assert transaction.num_undo_bytes == positions.numel() * (4 + 2)
    positions.zero_()  # the caller may reuse its buffer
    transaction.rollback()
    assert not tensors["big"].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_written_and_rolled_back():
    tensors = {name: tensor.cuda() for name, tensor in model().items() if name != "wide"}
    before = snapshot({name: tensor.cpu() for name, tensor in tensors.items()})
    transaction = WeightTransaction(tensors.items(), coverage="partial")
    for name, tensor in tensors.items():
        transaction.write(name, 0, noise(tensor.cpu()))
        transaction.write(name, 0, noise(tensor.cpu(), 5).cuda())
        if tensor.numel():
            transaction.write_elements(name, torch.tensor([0]), noise(tensor.cpu(), 6).view(tensor.dtype)[:1])
    transaction.rollback()
    assert snapshot({name: tensor.cpu() for name, tensor in tensors.items()}) == before
