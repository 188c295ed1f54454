"""Tests of sequences that continue the one before them, as the rows of a draft do: on every path, the bits of one whole
sequence, and its states after each part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.kernels.recurrent import conv, delta_rule
from lockstep.kernels.recurrent.selective_scan import selective_scan_in_slots
from lockstep.kernels.recurrent.slots import Slots
from lockstep.tests.optional_packages import needs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENDS = torch.tensor(
    [0, 3, 4, 5, 7, 8], dtype=torch.int32, device=DEVICE
)  # a chain of three parts, a lone one, one of two
READS, WRITES = [0, 5, 2, 7, 3], [5, 2, 6, 1, 4]
CHAINS = [((0, 1, 2), range(5)), ((3,), range(5, 7)), ((4,), range(7, 8))]

Run = Callable[[dict[str, Tensor], Tensor, Slots], Tensor]


def _delta(rows: dict[str, Tensor], ends: Tensor, slots: Slots) -> Tensor:
    return delta_rule.gated_delta_rule_in_slots(*rows.values(), ends, slots)


def _scan(rows: dict[str, Tensor], ends: Tensor, slots: Slots) -> Tensor:
    a = -torch.rand(4, 40, 24, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return selective_scan_in_slots(rows["x"], rows["dt"], a, rows["b"], rows["c"], None, ends, slots)


def _conv(rows: dict[str, Tensor], ends: Tensor, slots: Slots) -> Tensor:
    weight = torch.randn(70, 4, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return conv.causal_conv_in_slots(rows["x"], weight, None, ends, slots, "silu")


def _delta_rows(num_rows: int) -> dict[str, Tensor]:
    shapes = {"q": (2, 24), "k": (2, 24), "v": (4, 40), "g": (4,), "beta": (4,)}
    rows = {name: torch.randn(num_rows, *shape, device=DEVICE) for name, shape in shapes.items()}
    return {**rows, "g": -rows["g"].abs(), "beta": rows["beta"].sigmoid()}


def _scan_rows(num_rows: int) -> dict[str, Tensor]:
    shapes = {"x": (4, 40), "dt": (4, 40), "b": (4, 24), "c": (4, 24)}
    rows = {name: torch.randn(num_rows, *shape, device=DEVICE) for name, shape in shapes.items()}
    return {**rows, "dt": rows["dt"].sigmoid()}


def _conv_rows(num_rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(num_rows, 70, device=DEVICE)}


@pytest.fixture(params=["native", "torch", "triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and (DEVICE.type != "cpu" or delta_rule._native() is None):
        pytest.skip("the native kernels serve a CPU with a compiler")
    if request.param != "native":
        for module in (conv, delta_rule):
            monkeypatch.setattr(module, "_native", lambda: None)
            monkeypatch.setattr(module, "triton_serves", lambda device: request.param == "triton")
    if request.param == "triton":
        needs_triton()
    return request.param


@pytest.mark.parametrize(
    ("run", "make", "shape"),
    [(_delta, _delta_rows, (4, 24, 40)), (_scan, _scan_rows, (4, 24, 40)), (_conv, _conv_rows, (3, 70))],
    ids=["delta rule", "selective scan", "convolution"],
)
def test_a_chain_of_sequences_has_the_bits_of_one(path: str, run: Run, make: Callable, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, before = make(8), torch.randn(8, *shape, device=DEVICE)
    before[0] = 0.0
    pool = before.clone()
    out = run(rows, ENDS, Slots(pool, torch.tensor(READS, device=DEVICE), torch.tensor(WRITES, device=DEVICE)))
    for members, span in CHAINS:
        own = {name: value[span.start : span.stop] for name, value in rows.items()}
        for number, member in enumerate(members, 1):  # the first `number` parts as one sequence
            end = int(ENDS[member + 1]) - span.start
            alone = before.clone()
            slots = Slots(alone, torch.tensor([READS[members[0]]], device=DEVICE), torch.tensor([7], device=DEVICE))
            whole = run(
                {name: value[:end] for name, value in own.items()},
                torch.tensor([0, end], dtype=torch.int32, device=DEVICE),
                slots,
            )
            assert torch.equal(out[span.start : span.start + end], whole), (members, number)
            assert torch.equal(pool[WRITES[member]], alone[7]), (members, number)
    untouched = sorted(set(range(8)) - set(WRITES))
    assert torch.equal(pool[untouched], before[untouched])
