"""Both ends of an update over a group, each rank in a process of its own, with every fault that can be forced."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.integration.bench.parts.ports import HOST
from lockstep.tests.support.forked_ranks import free_port, join_group, run_ranks
from lockstep.weight_sync.deadline import Deadline
from lockstep.weight_sync.errors import PlanMismatch, TransferFailed
from lockstep.weight_sync.group import plan
from lockstep.weight_sync.group.framework_protocol import GLOO_DTYPES, receive_flattened_bucket, receive_tensors
from lockstep.weight_sync.group.plan import plan_broadcasts
from lockstep.weight_sync.group.protocol import receive_update, send_update
from lockstep.weight_sync.group.weight_group import WeightGroup
from lockstep.weight_sync.manifest import Manifest, TensorSpec, specs_of

BUCKET = 4096
Named = list[tuple[str, Tensor]]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


class Resident:
    """A sink that lends its tensors' memory; the tensors in `not_lent` only take copies."""

    def __init__(self, tensors: Named, not_lent: Sequence[str] = ()) -> None:
        self.tensors = {n: torch.zeros(t.nbytes, dtype=torch.uint8).view(t.dtype).view(t.shape) for n, t in tensors}
        self.not_lent = set(not_lent)
        self.written: set[str] = set()

    def expect(self, specs: Sequence[TensorSpec]) -> None:
        wrong = [s.describe() for s in specs if TensorSpec.of(s.name, self.tensors.get(s.name, torch.empty(0))) != s]
        if wrong:
            raise ValueError(f"not resident: {', '.join(wrong)}")

    def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
        if name in self.not_lent:
            return None
        self.written.add(name)
        return self.tensors[name].reshape(-1).view(torch.uint8)[offset : offset + num_bytes]

    def write(self, name: str, offset: int, data: Tensor) -> None:
        assert data.dtype == torch.uint8
        self.written.add(name)
        self.tensors[name].reshape(-1).view(torch.uint8)[offset : offset + data.numel()].copy_(data)

    def write_elements(self, name: str, positions: Tensor, values: Tensor) -> None:
        raise AssertionError("an update has whole tensors")

    def resident(self, name: str) -> Tensor:
        return self.tensors[name]

    def holds(self, tensors: Named) -> bool:
        return self.written == dict(tensors).keys() and all(bits(self.tensors[n]) == bits(t) for n, t in tensors)


def model(seed: int = 0) -> Named:
    """Make tensors smaller and larger than BUCKET, so that broadcasts are packed and cut: 7 broadcasts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        ("norm.0", normal(30)),
        ("embed", normal(70, 41).bfloat16()),
        ("norm.1", normal(30).bfloat16()),
        ("bias", normal(900)),
        ("head", normal(41, 70).t()),
        ("scale", normal()),
    ]


def all_dtypes() -> Named:
    named = []
    dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)} - {torch.complex32}
    for dtype in sorted(dtypes, key=str):
        if str(dtype).split(".")[1].startswith(("q", "bits", "int1_", "uint1_")) or dtype.itemsize == 0:
            continue
        for shape in ((7, 3), (), (0, 4), (2000,)):
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
            named.append((f"{dtype}{list(shape)}", raw.view(dtype).view(shape)))
    return named


def sender(port: int, size: int, tensors: Named, **options) -> Callable[[], object]:
    def rank() -> object:
        group = join_group(HOST, port, 0, size, "g", timeout_s=10)
        began = time.monotonic()
        try:
            send_update(group, Manifest("1", specs_of(tensors)), iter(tensors), **{"timeout_s": 10, **options})
        except (RuntimeError, ValueError) as error:
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
        return time.monotonic() - began, "sent"

    return rank


def receiver(
    port: int,
    index: int,
    size: int,
    tensors: Named,
    not_lent: Sequence[str] = (),
    sink: Resident | None = None,
    **options,
) -> Callable[[], object]:
    def rank() -> object:
        group = join_group(HOST, port, index, size, "g", timeout_s=10)
        resident = sink or Resident(tensors, not_lent)
        began = time.monotonic()
        try:
            receive_update(group, resident, **{"timeout_s": 10, **options})
        except (RuntimeError, ValueError) as error:
            return time.monotonic() - began, f"{type(error).__name__}: {error}"
        return time.monotonic() - began, "equal" if resident.holds(tensors) else "differs"

    return rank


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_plan_cuts_large_tensors_packs_small_ones_and_follows_their_order() -> None:
    sizes = {"a": 10, "B": 9000, "c": 3000, "d": 2000, "E": 4096}
    specs = [TensorSpec(name, torch.uint8, (size,)) for name, size in sizes.items()]
    plan = plan_broadcasts(specs, BUCKET)
    assert [b.names for b in plan] == [("B",), ("B",), ("B",), ("a", "c"), ("d",), ("E",)]
    assert [b.num_bytes for b in plan] == [4096, 4096, 808, 64 + 3000, 2000, 4096]
    assert [b.index for b in plan] == list(range(6))
    covered = {s.name: 0 for s in specs}
    for piece in (p for b in plan for p in b.pieces):
        assert piece.tensor_offset == covered[piece.name] and piece.tensor_offset % 64 == 0
        covered[piece.name] += piece.num_bytes
    assert covered == {s.name: s.num_bytes for s in specs}


# -- our own protocol -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [64, BUCKET, 1 << 20])
def test_update_reaches_two_receivers_bit_by_bit(bucket_bytes: int) -> None:
    port, tensors = free_port(), model()
    results = run_ranks(
        sender(port, 3, tensors, bucket_bytes=bucket_bytes),
        receiver(port, 1, 3, tensors, expected=Manifest("1", specs_of(tensors))),
        receiver(port, 2, 3, tensors, not_lent=["embed", "bias", "scale"]),
    )
    assert [said for _, said in results] == ["sent", "equal", "equal"]


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_every_dtype_scalars_and_empty_tensors_travel(bucket_bytes: int) -> None:
    port, tensors = free_port(), all_dtypes()
    assert {torch.float8_e4m3fn, torch.uint16, torch.bool, torch.float4_e2m1fn_x2} <= {t.dtype for _, t in tensors}
    results = run_ranks(sender(port, 2, tensors, bucket_bytes=bucket_bytes), receiver(port, 1, 2, tensors))
    assert [said for _, said in results] == ["sent", "equal"]


def test_updates_follow_each_other_and_tensors_are_taken_one_by_one() -> None:
    port, updates = free_port(), [model(seed) for seed in range(3)]
    empty: Named = []

    def send() -> int:
        group, given, most = join_group(HOST, port, 0, 2, "g", timeout_s=10), [], 0

        def made(tensors: Named) -> Iterator[tuple[str, Tensor]]:
            nonlocal most
            for name, tensor in tensors:
                fresh = tensor.clone()
                given.append(weakref.ref(fresh))
                most = max(most, sum(tensor() is not None for tensor in given))
                yield name, fresh

        for tensors in (*updates, empty):
            send_update(group, Manifest(None, specs_of(tensors)), made(tensors), BUCKET, timeout_s=10)
        assert not group.keys.has("0/plan", Deadline.after(1))
        return most

    def receive() -> list[bool]:
        group, equal = join_group(HOST, port, 1, 2, "g", timeout_s=10), []
        for tensors in (*updates, empty):
            sink = Resident(tensors)
            receive_update(group, sink, timeout_s=10)
            equal.append(sink.holds(tensors))
        return equal

    most, equal = run_ranks(send, receive)
    assert most <= 3 and equal == [True] * 4


def test_a_receiver_that_expects_other_tensors_is_a_mismatch_on_every_rank_and_the_group_lives_on() -> None:
    port, tensors = free_port(), model()
    other = [(n, t.float() if n == "embed" else t) for n, t in tensors if n != "scale"]
    first = "tensor 1: rank 2 expects embed float32[70, 41], rank 0 sends embed bfloat16[70, 41]"

    def rank(index: int) -> tuple[str, str]:
        group, said = join_group(HOST, port, index, 3, "g", timeout_s=10), []
        for attempt in range(2):
            sink = Resident(tensors)
            wanted = Manifest("1", specs_of(other if index == 2 and attempt == 0 else tensors))
            try:
                if index == 0:
                    send_update(group, Manifest("1", specs_of(tensors)), tensors, BUCKET, timeout_s=10)
                else:
                    receive_update(group, sink, timeout_s=10, expected=wanted)
                said.append("done" if index == 0 or sink.holds(tensors) else "differs")
            except PlanMismatch as error:
                said.append(str(error))
                assert not sink.written
        return tuple(said)

    assert run_ranks(*(lambda i=i: rank(i) for i in range(3))) == [(first, "done")] * 3


def test_a_sink_that_refuses_is_told_to_every_rank_before_a_byte_moves() -> None:
    port, tensors = free_port(), model()
    sink = Resident(tensors[:-1])
    results = run_ranks(
        sender(port, 3, tensors), receiver(port, 1, 3, tensors, sink=sink), receiver(port, 2, 3, tensors)
    )
    assert results[1][1] == "ValueError: not resident: scale float32[]"
    for _, said in (results[0], results[2]):
        assert said.startswith("PlanMismatch: rank 1 of group 'g'") and "scale float32[]" in said


def test_versions_and_library_versions_that_differ_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    port, tensors = free_port(), model()
    expected = Manifest("2", specs_of(tensors))
    results = run_ranks(sender(port, 2, tensors), receiver(port, 1, 2, tensors, expected=expected))
    assert all("PlanMismatch: version: rank 1 expects '2', rank 0 sends '1'" in said for _, said in results)

    def other_cut() -> object:
        plan.PACKED_BYTES = 64
        return receiver(port, 1, 2, tensors)()

    port = free_port()
    results = run_ranks(sender(port, 2, tensors), other_cut)
    assert all("cut the same tensors into different broadcasts" in said for _, said in results)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_tensors_that_are_not_the_manifests_fail_on_both_ends_with_the_reason(fault: str) -> None:
    port, tensors = free_port(), model()
    given = {
        "missing": tensors[:-1],
        "extra": [*tensors, ("more", torch.zeros(3))],
        "shape": [*tensors[:3], ("bias", torch.zeros(901)), *tensors[4:]],
    }[fault]

    def send() -> str:
        group = join_group(HOST, port, 0, 2, "g", timeout_s=10)
        send_update(group, Manifest("1", specs_of(tensors)), given, BUCKET, timeout_s=10)
        return "sent"

    sent, (took, received) = run_ranks(send, receiver(port, 1, 2, tensors))
    reason = {"missing": "gave nothing", "extra": "gave more", "shape": "gave bias float32[901]"}[fault]
    assert sent.startswith("ValueError") and reason in sent
    assert received.startswith("TransferFailed: rank 1 of group 'g', ") and reason in received
    assert took < 9


def test_a_sink_that_fails_half_way_is_named_by_the_sender() -> None:
    port, tensors = free_port(), model()

    class Failing(Resident):
        def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
            if name == "embed" and offset:
                raise ValueError("embed cannot be undone")
            return super().destination(name, offset, num_bytes)

    results = run_ranks(
        sender(port, 3, tensors, bucket_bytes=BUCKET),
        receiver(port, 1, 3, tensors),
        receiver(port, 2, 3, tensors, sink=Failing(tensors)),
    )
    assert results[2][1] == "ValueError: embed cannot be undone"
    for took, said in results[:2]:
        assert said.startswith("TransferFailed") and "embed cannot be undone" in said
        assert took < 9


# -- faults -----------------------------------------------------------------------------------------------------------


def dying(tensors: Named, after: int, how: signal.Signals) -> Iterator[tuple[str, Tensor]]:
    for index, pair in enumerate(tensors):
        if index == after:
            os.kill(os.getpid(), how)
        yield pair
    if after == len(tensors):
        os.kill(os.getpid(), how)


_SLOW = pytest.mark.slow


@pytest.mark.parametrize("after", [pytest.param(i, marks=[] if i in (0, 3, 6) else _SLOW) for i in range(7)])
def test_a_sender_killed_between_any_two_tensors_is_an_error_at_once(after: int) -> None:
    port, tensors = free_port(), model()

    def send() -> None:
        group = join_group(HOST, port, 0, 3, "g", timeout_s=10)
        given = dying(tensors, after, signal.SIGKILL)
        send_update(group, Manifest("1", specs_of(tensors)), given, BUCKET, timeout_s=10)

    killed, *others = run_ranks(send, receiver(port, 1, 3, tensors), receiver(port, 2, 3, tensors))
    assert killed is None
    last = 6  # when the sender ends after its last broadcast and before its receipts, a receiver may have everything
    for index, (took, said) in enumerate(others, 1):
        assert took < 9
        if after < last or said != "equal":
            assert said.startswith(f"TransferFailed: rank {index} of group 'g', ") and ", tensor " in said


@pytest.mark.parametrize("after", [pytest.param(0, marks=_SLOW), 3, pytest.param(5, marks=_SLOW)])
def test_a_sender_that_hangs_is_an_error_at_the_deadline(after: int) -> None:
    port, tensors = free_port(), model()

    def send() -> None:
        group = join_group(HOST, port, 0, 3, "g", timeout_s=10)
        given = dying(tensors, after, signal.SIGSTOP)
        send_update(group, Manifest("1", specs_of(tensors)), given, BUCKET, timeout_s=10)

    *others, stopped = run_ranks(
        receiver(port, 1, 3, tensors, timeout_s=1.0), receiver(port, 2, 3, tensors, timeout_s=1.0), send, num_endless=1
    )
    assert stopped is None
    for index, (took, said) in enumerate(others, 1):
        assert said.startswith(f"TransferFailed: rank {index} of group 'g', ") and ", tensor " in said
        assert 0.9 < took < 9


@pytest.mark.parametrize(
    ("when", "how"),
    [
        pytest.param("plan", signal.SIGKILL, marks=_SLOW),
        ("plan", signal.SIGSTOP),
        ("piece", signal.SIGKILL),
        pytest.param("piece", signal.SIGSTOP, marks=_SLOW),
    ],
)
def test_a_receiver_that_dies_or_hangs_is_named_by_the_sender(when: str, how: signal.Signals) -> None:
    port, tensors = free_port(), model()

    class Dying(Resident):
        def expect(self, specs: Sequence[TensorSpec]) -> None:
            if when == "plan":
                os.kill(os.getpid(), how)

        def destination(self, name: str, offset: int, num_bytes: int) -> Tensor | None:
            if name == "embed" and offset:
                os.kill(os.getpid(), how)
            return super().destination(name, offset, num_bytes)

    sent, received, died = run_ranks(
        sender(port, 3, tensors, bucket_bytes=BUCKET, timeout_s=1.0),
        receiver(port, 1, 3, tensors, timeout_s=1.0),
        receiver(port, 2, 3, tensors, sink=Dying(tensors)),
        num_endless=1,
    )
    assert died is None
    expected = "no verdict of rank 2" if when == "plan" else "rank 2 does not answer"
    assert sent[1].startswith("TransferFailed: rank 0 of group 'g', ") and expected in sent[1]
    assert received[1].startswith("TransferFailed: ") and "tensor " in received[1]
    assert sent[0] < 4 and received[0] < 4


def test_a_large_broadcast_killed_in_its_middle_is_an_error_at_once() -> None:
    port, tensors = free_port(), [("big", torch.zeros(64 << 20, dtype=torch.uint8))]

    def send() -> None:
        group = join_group(HOST, port, 0, 2, "g", timeout_s=10)
        threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
        for _ in range(50):
            send_update(group, Manifest("1", specs_of(tensors)), tensors, timeout_s=10)

    def receive() -> str:
        group, sink = join_group(HOST, port, 1, 2, "g", timeout_s=10), Resident(tensors)
        for _ in range(50):
            receive_update(group, sink, timeout_s=10)
        return "all"

    killed, said = run_ranks(send, receive)
    assert killed is None and said.startswith("TransferFailed: rank 1 of group 'g', ")


def test_a_sender_and_a_receiver_that_nobody_meets_end_at_their_deadline() -> None:
    port, tensors = free_port(), model()
    for index in (0, 1):
        port = free_port()
        waits = sender(port, 2, tensors, timeout_s=0.7) if index == 0 else receiver(port, 1, 2, tensors, timeout_s=0.7)

        def idle(index: int = index, port: int = port) -> None:
            join_group(HOST, port, 1 - index, 2, "g", timeout_s=10)
            signal.pause()

        (took, said), _ = run_ranks(waits, idle, num_endless=1)
        assert said.startswith(f"TransferFailed: rank {index} of group 'g', agreeing on the plan")
        assert ("no verdict of rank 1" if index == 0 else "no plan of rank 0") in said
        assert 0.6 < took < 9


def test_an_update_that_the_sender_gave_up_on_is_passed_over_by_who_comes_late() -> None:
    port, tensors = free_port(), model()

    def send() -> str:
        group = join_group(HOST, port, 0, 2, "g", timeout_s=10)
        manifest = Manifest("1", specs_of(tensors))
        with pytest.raises(TransferFailed, match="no verdict of rank 1"):
            send_update(group, manifest, tensors, timeout_s=0.3)
        group.keys.put("late", "", Deadline.after(5))
        send_update(group, manifest, tensors, timeout_s=10)
        return "sent"

    def receive() -> bool:
        group, sink = join_group(HOST, port, 1, 2, "g", timeout_s=10), Resident(tensors)
        group.keys.get("late", Deadline.after(10))
        receive_update(group, sink, timeout_s=10)
        return sink.holds(tensors)

    assert run_ranks(send, receive) == ["sent", True]


def test_a_broken_group_refuses_and_the_wrong_end_is_refused() -> None:
    group = join_group(HOST, free_port(), 0, 1, "g", timeout_s=5)
    manifest = Manifest("1", specs_of(model()))
    with pytest.raises(ValueError, match="rank 0 sends"):
        receive_update(group, Resident([]))
    twice = Manifest("1", (manifest.tensors[0], *manifest.tensors))
    with pytest.raises(ValueError, match=r"more than once: norm\.0"):
        send_update(group, twice, [])
    send_update(group, manifest, model(), timeout_s=5)
    with pytest.raises(ValueError, match="gave nothing"):
        send_update(group, manifest, [], timeout_s=5)
    with pytest.raises(TransferFailed, match="interrupted; destroy the group"):
        send_update(group, manifest, model(), timeout_s=5)
    group.destroy()


# -- the frameworks' senders ------------------------------------------------------------------------------------------


def foreign_sender(port: int, size: int, broadcasts: Callable[[dist.ProcessGroup], object]) -> Callable[[], object]:
    """Run a trainer's end: the steps of SGLang's init_custom_process_group, private names included."""

    def rank() -> object:
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

        timeout = timedelta(seconds=10)
        store, index, world_size = next(rendezvous(f"tcp://{HOST}:{port}", 0, size, timeout=timeout))
        store.set_timeout(timeout)
        store = dist.PrefixStore("slime-pp_0", store)
        group, _ = _new_process_group_helper(
            world_size, index, [], Backend("gloo"), store, group_name="slime-pp_0", timeout=timeout
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        broadcasts(group)
        # Killed, not ended: the store must outlive the receivers' last read.
        signal.pause()

    return rank


def foreign_receiver(
    port: int, index: int, size: int, receive: Callable[[WeightGroup], object]
) -> Callable[[], object]:
    return lambda: receive(join_group(HOST, port, index, size, "slime-pp_0", timeout_s=10))


def test_per_tensor_broadcasts_of_a_framework_arrive_in_list_order() -> None:
    port = free_port()
    tensors = [(n, t) for n, t in [*model(), *all_dtypes()] if t.dtype in GLOO_DTYPES]
    assert torch.complex64 in {t.dtype for _, t in tensors}

    def send(group: dist.ProcessGroup) -> None:
        works = [dist.broadcast(t.contiguous(), group=group, group_src=0, async_op=True) for _, t in tensors]
        for work in works:
            work.wait()

    def receive(group: WeightGroup) -> bool:
        sink = Resident(tensors, not_lent=["embed", "scale"])
        receive_tensors(group, specs_of(tensors), sink, timeout_s=10)
        return sink.holds(tensors)

    *results, _ = run_ranks(
        *(foreign_receiver(port, i, 3, receive) for i in (1, 2)), foreign_sender(port, 3, send), num_endless=1
    )
    assert results == [True, True]


def test_flattened_bucket_of_a_framework_is_unpacked_without_alignment() -> None:
    port, tensors = free_port(), [("odd", torch.arange(3, dtype=torch.uint8)), *all_dtypes()]

    def send(group: dist.ProcessGroup) -> None:
        flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for _, t in tensors])
        for _ in range(2):
            dist.broadcast(flat, group=group, group_src=0)
        dist.broadcast(torch.empty(0, dtype=torch.uint8), group=group, group_src=0)

    def receive(group: WeightGroup) -> list[bool]:
        equal = []
        for wanted in (tensors, tensors, []):
            sink = Resident(wanted)
            receive_flattened_bucket(group, specs_of(wanted), sink, timeout_s=10)
            equal.append(sink.holds(wanted))
        return equal

    result, _ = run_ranks(foreign_receiver(port, 1, 2, receive), foreign_sender(port, 2, send), num_endless=1)
    assert result == [True] * 3


def test_what_gloo_cannot_carry_or_the_sink_refuses_is_refused_before_the_first_broadcast() -> None:
    group = join_group(HOST, free_port(), 0, 1, "g", timeout_s=5)
    tensors = [("a", torch.zeros(3)), ("b", torch.zeros(3, dtype=torch.uint16)), ("c", torch.zeros(2).short())]
    sink = Resident(tensors)
    with pytest.raises(ValueError, match=r"b uint16\[3\], c int16\[2\]"):
        receive_tensors(group, specs_of(tensors), sink)
    with pytest.raises(ValueError, match=r"not resident: x float32\[1\]"):
        receive_tensors(group, specs_of([("x", torch.zeros(1))]), sink)
    with pytest.raises(ValueError, match=r"not resident: x float32\[1\]"):
        receive_flattened_bucket(group, specs_of([("x", torch.zeros(1))]), sink)
    assert group.broken is None and not sink.written
    group.destroy()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_framework_that_dies_or_hangs_between_two_tensors_is_an_error(how: signal.Signals) -> None:
    port, tensors = free_port(), model()

    def send(group: dist.ProcessGroup) -> None:
        dist.broadcast(tensors[0][1], group=group, group_src=0)
        os.kill(os.getpid(), how)

    def receive(group: WeightGroup) -> tuple[float, str, str]:
        began = time.monotonic()
        with pytest.raises(TransferFailed) as caught:
            receive_tensors(group, specs_of(tensors), Resident(tensors), timeout_s=1.0)
        return time.monotonic() - began, str(caught.value), str(group.broken)

    ranks = foreign_receiver(port, 1, 2, receive), foreign_sender(port, 2, send)
    (took, said, broken), _ = run_ranks(*ranks, num_endless=1)
    assert took < 9
    assert "rank 1 of group 'slime-pp_0', broadcast 2 of 6, tensor embed" in said
    assert "interrupted" in broken


@pytest.mark.parametrize(("num_sent", "said"), [(600, "less than the 4000 bytes"), (1900, "more than the 4000 bytes")])
def test_a_framework_that_sends_another_size_than_it_said_is_found_out_by_every_rank(num_sent: int, said: str) -> None:
    port, described = free_port(), [("w", torch.zeros(1000))]

    def send(group: dist.ProcessGroup) -> None:
        dist.broadcast(torch.ones(num_sent), group=group, group_src=0)

    def receive(group: WeightGroup) -> tuple[str, bool]:
        sink = Resident(described)
        with pytest.raises(TransferFailed) as caught:
            receive_tensors(group, specs_of(described), sink, timeout_s=5)
        return str(caught.value), not sink.written

    *results, _ = run_ranks(
        *(foreign_receiver(port, i, 3, receive) for i in (1, 2)), foreign_sender(port, 3, send), num_endless=1
    )
    for text, is_untouched in results:
        assert said in text and "tensor w" in text
        assert is_untouched
