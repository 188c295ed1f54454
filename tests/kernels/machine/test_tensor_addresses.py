"""Tests of the look at tensors' addresses: every way in which a module's tensor moves is seen, natively and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.kernels.machine import native, tensor_addresses
from lockstep.kernels.machine.tensor_addresses import SOURCE, TensorAddresses


@pytest.fixture(params=["native", "python"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(tensor_addresses, "_reader", lambda: None)
    elif native.load(SOURCE) is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
    layers.register_buffer("absent", None)
    return layers


def addresses_of(module: nn.Module) -> TensorAddresses:
    return TensorAddresses([owner for part in module.modules() for owner in (part._parameters, part._buffers)])


def replace_parameter(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.zeros(4, 4))


def replace_data(module: nn.Sequential) -> None:
    module[0].bias.data = torch.zeros(4)


def replace_buffer(module: nn.Sequential) -> None:
    module[2].running_mean = torch.ones(4)


def set_memory(module: nn.Sequential) -> None:
    with torch.no_grad():
        module[0].weight.set_(torch.zeros(4, 4))


def free_memory(module: nn.Sequential) -> None:
    module[0].weight.untyped_storage().resize_(0)


def swap(module: nn.Sequential) -> None:
    torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.zeros(4, 4)))


def exchange(module: nn.Sequential) -> None:
    first, second = module[0].weight, module[1].weight
    module[0].weight, module[1].weight = second, first


def remove(module: nn.Sequential) -> None:
    module[0].bias = None


def add(module: nn.Sequential) -> None:
    module[1].bias = nn.Parameter(torch.zeros(4))


def fill(module: nn.Sequential) -> None:
    module.absent = torch.zeros(2)


WAYS = [
    replace_parameter, replace_data, replace_buffer, set_memory, free_memory, swap, exchange, remove, add, fill,
]  # fmt: skip


@pytest.mark.parametrize("move", WAYS, ids=lambda way: way.__name__)
def test_a_tensor_that_moved_is_seen(path: str, move: Callable[[nn.Sequential], None]) -> None:
    module = model()
    before = addresses_of(module)
    assert before.are_same()
    kept = list(module.parameters()) + [b for b in module.buffers() if b is not None]  # no address is used twice
    move(module)
    assert not before.are_same()
    assert addresses_of(module).are_same()
    del kept


def test_values_may_change(path: str) -> None:
    module = model()
    before = addresses_of(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module[0].weight.grad = torch.zeros(4, 4)
    assert before.are_same()


def test_no_tensor_is_kept_alive(path: str) -> None:
    module = model()
    before = addresses_of(module)
    freed = []
    torch.nn.Parameter.__del__ = lambda self: freed.append(1)  # type: ignore[attr-defined]
    try:
        replace_parameter(module)
    finally:
        del torch.nn.Parameter.__del__  # type: ignore[attr-defined]
    assert freed == [1] and not before.are_same()


class Tagged(Tensor):
    """A subclass, as quantised weights and others are."""


def test_tensors_of_subclasses_are_read_too(path: str) -> None:
    owner = {"a": torch.zeros(3).as_subclass(Tagged), "none": None, "b": torch.zeros(0)}
    before = TensorAddresses([owner, {}])
    assert before.are_same()
    owner["a"] = torch.zeros(3).as_subclass(Tagged)
    assert not before.are_same()


def test_nothing_is_the_same_as_nothing(path: str) -> None:
    assert TensorAddresses([]).are_same() and TensorAddresses([{}]).are_same()


@pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
def test_this_pytorch_is_read_natively() -> None:
    """Otherwise each step takes a tenth of a millisecond longer, and nothing says so."""
    assert tensor_addresses._reader() is not None
