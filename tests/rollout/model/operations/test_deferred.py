"""Tests of deferred tensors: whoever reads one gets its value, and a norm or an attention gets its operands."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from lockstep.kernels.layers.rms_norm import NormRule, rms_norm
from lockstep.kernels.layers.rotary import rotary, rotary_into_cache
from lockstep.rollout.model.operations import deferred
from lockstep.rollout.model.operations.deferred import DeferredNorm, DeferredSum, Rotation
from lockstep.rollout.model.operations.functions import ReplacedFunctions, invariant_functions, outside_modes

RULE = NormRule(1e-6)


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()


@pytest.mark.parametrize(
    "use",
    [lambda x: x * 2, lambda x: 2 - x, lambda x: F.silu(x), lambda x: x[1:], lambda x: torch.cat([x, x]),
     lambda x: x.float().sum(), lambda x: x.transpose(0, 1).contiguous(), lambda x: F.linear(x, x[:2]),
     lambda x: torch.stack([x, x]).amax(0), outside_modes(lambda x: x.add(1)), lambda x: x.clone()],
)  # fmt: skip
def test_an_operation_on_a_deferred_sum_is_that_on_the_sum(operands, use) -> None:
    left, right = operands
    found = use(DeferredSum(left, right))
    assert type(found) is Tensor and torch.equal(found, use(left + right))


def test_a_norm_takes_the_operands_and_leaves_the_sum(operands) -> None:
    left, right = operands
    weight, waiting = torch.randn(8).bfloat16(), DeferredSum(left, right)
    assert waiting.shape == (3, 8) and waiting.dtype is torch.bfloat16
    assert torch.equal(waiting.normed(weight, RULE), rms_norm(left + right, weight, RULE))
    assert torch.equal(waiting.value(), left + right)
    assert torch.equal(waiting.normed(weight, RULE), rms_norm(left + right, weight, RULE))


def test_operands_that_change_in_place_change_no_sum(operands) -> None:
    left, right = operands
    expected = left + right
    mode = ReplacedFunctions({}, defers=True)
    waiting = DeferredSum(left, right)
    with mode:
        left.mul_(2)
    assert torch.equal(waiting.value(), expected)
    again = DeferredSum(left, right)
    expected = left + right
    with mode:
        left[1] = 0
    assert torch.equal(again.value(), expected)


@pytest.mark.parametrize(
    "change",
    [lambda x: F.relu(x, inplace=True), lambda x: torch.mul(x, 2, out=x), lambda x: setattr(x, "data", x * 2),
     lambda x: torch.nn.LeakyReLU(0.1, inplace=True)(x), lambda x: torch._foreach_mul_([x], 2),
     lambda x: torch.ops.aten.mul_.Scalar(x, 2), lambda x: x.view(-1).__setitem__(0, 7)],
)  # fmt: skip
def test_operands_that_change_by_argument_setter_or_operator_change_no_sum(monkeypatch, operands, change) -> None:
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    left, right = operands
    left[0, 0] = -1
    expected = left + right

    def forward() -> Tensor:
        total = left + right
        change(left)
        return total

    with torch.no_grad():
        found = invariant_functions(F.linear, defers=True).around(forward)()
    assert torch.equal(found, expected)


def test_a_sum_of_named_operands_is_deferred_too(monkeypatch, operands) -> None:
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    left, right = operands
    sums = lambda: (torch.add(input=left, other=right), left.add(other=right))  # noqa: E731
    with torch.no_grad():
        found = invariant_functions(F.linear, defers=True).around(sums)()
    assert all(torch.equal(each, left + right) for each in found)


def test_what_a_hook_has_kept_is_computed_when_the_forward_ends(monkeypatch, operands) -> None:
    # Its operands may be weights, which the next update writes.
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    left, right = operands
    expected, kept = left + right, []
    with torch.no_grad():
        invariant_functions(F.linear, defers=True).around(lambda: kept.append(left + right))()
        left.zero_()
    assert isinstance(kept[0], DeferredSum) and torch.equal(kept[0].value(), expected)


def test_an_operation_of_another_thread_computes_no_sum_of_this_one(operands) -> None:
    # It would do so on its own stream, and outside of a capture that this thread may be in.
    waiting = DeferredSum(*operands)
    mode = ReplacedFunctions({}, defers=True)

    def write() -> None:
        with mode:
            torch.zeros(4).add_(1)

    other = threading.Thread(target=write)
    other.start()
    other.join()
    assert waiting._value is None and deferred.is_any_waiting()
    other = threading.Thread(target=waiting.value)
    other.start()
    other.join()
    assert waiting._value is not None and torch.equal(waiting.value(), torch.add(*operands))


def test_a_sum_that_was_computed_holds_its_operands_no_longer() -> None:
    left, right = torch.randn(3, 8), torch.randn(3, 8)
    waiting, held = DeferredSum(left, right), [weakref.ref(left), weakref.ref(right)]
    del left, right
    waiting.normed(torch.ones(8), RULE)
    assert [each() for each in held] == [None, None]


def test_an_output_without_deferred_tensors_is_returned_itself(operands) -> None:
    # Code that comes with a checkpoint may have put attributes on it, which a copy would lack.
    output = CausalLMOutputWithPast(logits=operands[0])
    assert ReplacedFunctions({}, defers=True).around(lambda: output)() is output


def test_what_nobody_reads_is_forgotten(operands) -> None:
    before = deferred.is_any_waiting()
    waiting = DeferredSum(*operands)
    assert deferred.is_any_waiting()
    del waiting
    gc.collect()
    assert deferred.is_any_waiting() == before


def test_a_forward_under_the_mode_returns_plain_tensors(operands) -> None:
    forward = ReplacedFunctions({}, defers=True).around(lambda left, right: {"sum": DeferredSum(left, right)})
    assert type(forward(*operands)["sum"]) is Tensor


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_pass_through_checkpoints_of_layers(monkeypatch, use_reentrant) -> None:
    # A reentrant checkpoint runs its function without gradients and makes autograd's node of what it returns.
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return x + x @ weight

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return x.square().sum()

    expected = torch.autograd.grad(layer(layer(x)).square().sum(), (weight, x))
    invariant_functions(F.linear, defers=True).around(layers)(x).backward()
    for leaf, gradient in zip((weight, x), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_a_forward_without_gradients_defers_within_one_with_them(monkeypatch, operands) -> None:
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    found = []
    inner = invariant_functions(F.linear, defers=True).around(lambda: found.append(torch.add(*operands)))
    outer = invariant_functions(F.linear, defers=True).around(lambda: (torch.no_grad()(inner)(), torch.add(*operands)))
    result = outer()
    assert isinstance(found[0], DeferredSum) and type(result[1]) is Tensor
    with torch.no_grad():
        assert deferred.may_wait(operands[0])


def test_a_kernel_of_ours_gets_the_value_under_the_mode_too(monkeypatch, operands) -> None:
    # Layers that norm their results hand a sum to the next product, with no norm between (OLMo2).
    monkeypatch.setattr(deferred, "triton_serves", lambda device: True)
    kernel = outside_modes(lambda x: (type(x), x.data_ptr()))
    forward = invariant_functions(F.linear, defers=True).around(lambda: kernel(torch.add(*operands)))
    with torch.no_grad():
        kind, address = forward()
    assert kind is Tensor and address != 0


@pytest.fixture
def heads() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, 5, 16) for heads in (4, 2, 2))
    angles = torch.randn(1, 5, 16)
    return query, key, value, angles.cos(), angles.sin()


def test_a_rotation_is_one_for_both_and_is_known_by_its_query_and_key_alone(heads) -> None:
    query, key, _, cos, sin = heads
    rotation = Rotation(query, key, cos, sin)
    turned, turned_key = rotation.deferred()
    assert Rotation.of(turned, turned_key) is rotation
    assert Rotation.of(turned_key, turned) is None
    assert Rotation.of(turned, key) is None
    assert Rotation.of(turned, Rotation(query, key, cos, sin).deferred()[1]) is None
    assert torch.equal(turned * 1, rotary(query, key, cos, sin)[0])
    assert Rotation.of(turned, turned_key) is None, "it has been read"
    assert torch.equal(turned_key.value(), rotary(query, key, cos, sin)[1])


def test_a_rotation_that_nothing_reads_is_freed_at_once(heads) -> None:
    # The KV write takes its operands. A cycle of references would hold them until the collector runs.
    query, key, _, cos, sin = heads
    gc.disable()
    try:
        tensors = Rotation(query, key, cos, sin).deferred()
        freed = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(tensors[0].rotation)]
        del tensors
        assert [each() for each in freed] == [None] * 3
    finally:
        gc.enable()


def test_a_value_that_is_read_later_belongs_to_no_graph(operands) -> None:
    # What a hook keeps of an engine's step may be read while the trainer's forward runs.
    weight = torch.rand(8).bfloat16().requires_grad_()
    with torch.inference_mode():
        waiting = DeferredNorm(operands[0] * 1, weight, RULE)
    assert not waiting.value().requires_grad
    assert torch.equal(waiting.value(), rms_norm(operands[0], weight.detach(), RULE))


def test_a_rotation_into_a_cache_writes_what_the_two_steps_write(heads) -> None:
    query, key, value, cos, sin = heads
    caches = tuple(torch.zeros(2, 4, 2, 16) for _ in range(2))
    slots = torch.tensor([7, 0, 3, 5, 2])
    out = rotary_into_cache(query, key, cos, sin, value, caches, slots)
    rotated = rotary(query, key, cos, sin)
    assert torch.equal(out, rotated[0][0].transpose(0, 1))
    assert torch.equal(caches[0].flatten(0, 1)[slots], rotated[1][0].transpose(0, 1))
    assert torch.equal(caches[1].flatten(0, 1)[slots], value[0].transpose(0, 1))


@pytest.fixture
def normed(heads) -> tuple[DeferredNorm, DeferredNorm, Tensor, Tensor]:
    """Make the norms of query and key as a module does, before their heads are turned, and cos and sin."""
    query, key, _, cos, sin = heads
    weights = torch.rand(2, 16) + 0.5
    turned = (x.transpose(1, 2).contiguous() for x in (query, key))
    query, key = (DeferredNorm(x, weight, RULE) for x, weight in zip(turned, weights, strict=True))
    return query, key, cos, sin


def test_the_norms_of_heads_wait_for_their_rotation(normed) -> None:
    query, key, cos, sin = normed
    turned = query.transpose(1, 2), key.transpose(2, 1)
    assert [type(each) for each in turned] == [DeferredNorm] * 2
    rotation = Rotation(*turned, cos, sin)
    norms = rotation.norms
    assert norms.query is query.weight and norms.key is key.weight and norms.rule == RULE
    assert [type(operand) for operand in rotation.operands] == [Tensor] * 4
    rotated = rotation.deferred()
    assert Rotation.of(*rotated) is rotation
    heads = [rms_norm(each.x, each.weight, RULE).transpose(1, 2) for each in (query, key)]
    for found, expected in zip(rotated, rotary(*heads, cos, sin), strict=True):
        assert torch.equal(found.value(), expected)
    assert torch.equal(turned[0].value(), heads[0]) and turned[0].value().stride() == heads[0].stride()


def test_norms_that_have_been_read_or_differ_are_those_of_a_plain_rotation(normed) -> None:
    query, key, cos, sin = normed
    other = DeferredNorm(key.x, key.weight, NormRule(1e-5))
    assert Rotation(query.transpose(1, 2), other.transpose(1, 2), cos, sin).norms is None
    plain = key.value().transpose(1, 2)
    for its in (key.transpose(1, 2), plain):
        rotation = Rotation(query.transpose(1, 2), its, cos, sin)
        assert rotation.norms is None
        heads = rms_norm(query.x, query.weight, RULE).transpose(1, 2), plain
        assert all(map(torch.equal, rotation.values(), rotary(*heads, cos, sin)))
    assert type(query.transpose(0, 1)) is Tensor and type(query.transpose(1, 2)) is Tensor, "it has been read"


def test_norms_and_rotation_into_a_cache_write_what_all_the_steps_write(heads, normed) -> None:
    value, (query, key, cos, sin) = heads[2], normed
    rotation = Rotation(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    assert rotation.norms is not None
    caches = tuple(torch.zeros(2, 4, 2, 16) for _ in range(2))
    slots = torch.tensor([7, 0, 3, 5, 2])
    out = rotary_into_cache(*rotation.operands, value, caches, slots, rotation.norms)
    assert torch.equal(out, rotation.values()[0][0].transpose(0, 1))
    assert torch.equal(caches[0].flatten(0, 1)[slots], rotation.values()[1][0].transpose(0, 1))
    assert torch.equal(caches[1].flatten(0, 1)[slots], value[0].transpose(0, 1))
