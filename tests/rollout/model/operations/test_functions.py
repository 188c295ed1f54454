"""Tests of functions of torch inside a hosted module: a row keeps its bits in any batch, and nothing is random."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lockstep.kernels.linear.linear import invariant_linear, native_products
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.operations import functions as operations
from lockstep.rollout.model.operations.functions import invariant_functions
from lockstep.rollout.sampling_params import SamplingParams

WEIGHT, SMALL = torch.randn(48, 40), torch.randn(9, 4, 5)
BIAS, PARAMETER = torch.randn(40), nn.Parameter(WEIGHT.t().clone(), requires_grad=False)


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def functions():
    return invariant_functions(lambda x, weight, bias=None: invariant_linear(x, weight, bias, method="native"))


BY_ROW = {  # computed for each row of [9, 48] alone
    "matmul": lambda x: torch.matmul(x, WEIGHT),
    "at": lambda x: x @ WEIGHT,
    "vector": lambda x: x @ WEIGHT[:, 0],
    "parameter before columns": lambda x: (PARAMETER @ x[None].mT)[0].mT,
    "mm": lambda x: x.mm(WEIGHT),
    "bmm": lambda x: torch.bmm(x[None].expand(2, -1, -1), WEIGHT.view(2, 24, 40).repeat(1, 2, 1))[1],
    "addmm": lambda x: torch.addmm(BIAS, x, WEIGHT),
    "baddbmm": lambda x: torch.baddbmm(BIAS, x[None], WEIGHT[None])[0],
    "einsum": lambda x: torch.einsum("nk,kd->nd", x, WEIGHT),
    "einsum of heads": lambda x: torch.einsum("nhk,hkd->ndh", x.view(-1, 2, 24), WEIGHT.view(2, 24, 40)),
    "few numbers, many columns": lambda x: (
        torch.bmm(x[:, :32].unflatten(1, (2, 16)).transpose(0, 1), WEIGHT[:32].view(2, 16, 40))
        .transpose(0, 1)
        .flatten(1)
    ),
    "sigmoid": lambda x: torch.sigmoid(x[:, :5].contiguous()),
    "expit": lambda x: torch.special.expit(x[:, :5].contiguous()),
    "softplus": lambda x: F.softplus(x[:, :5].contiguous()),
    "mish": lambda x: F.mish(x[:, :5].contiguous()),
    "elu": lambda x: F.elu(x[:, :5].contiguous()),
    "celu": lambda x: F.celu(x[:, :5].contiguous(), 0.7),
    "selu": lambda x: F.selu(x[:, :5].contiguous()),
    "glu": lambda x: F.glu(x[:, :6].contiguous(), -1),
    "silu": lambda x: F.silu(x[:, :5].contiguous()),
    "gelu": lambda x: F.gelu(x[:, :5].contiguous()),
    "power": lambda x: (1 + x[:, :5].square()) ** 0.1,
    "power of a number": lambda x: 1.3 ** x[:, :5],
    "powers": lambda x: torch.pow(input=1 + x[:, :5].square(), exponent=x[:, 5:10]),
    "exp2": lambda x: torch.exp2(x[:, :5].contiguous()),
    "sinh": lambda x: x[:, :5].sinh(),
    "atan2": lambda x: torch.atan2(x[:, :5], x[:, 5:10]),
    "logaddexp": lambda x: torch.logaddexp(x[:, :5], x[:, 5:10]),
    "cosh": lambda x: torch.cosh(x[:, :5]),
    "atanh": lambda x: torch.atanh(x[:, :5].tanh() * 0.9),
    "mv": lambda x: torch.mv(x, WEIGHT[:, 0]),
    "addmv": lambda x: torch.addmv(x[:, 0], x, WEIGHT[:, 0]),
    "inner": lambda x: torch.inner(x, WEIGHT.t()),
    "inner with a vector": lambda x: x.inner(WEIGHT[:, 0]),
    "tensordot": lambda x: torch.tensordot(x, WEIGHT, 1),
    "tensordot over named dimensions": lambda x: torch.tensordot(
        x.view(-1, 6, 8), WEIGHT.view(8, 6, 40), dims=([1, 2], [1, 0])
    ),
    "bilinear": lambda x: F.bilinear(x, x, WEIGHT.t().reshape(40, 48, 1).repeat(1, 1, 48) / 48, BIAS),
    "cdist": lambda x: torch.cdist(x, WEIGHT.t().contiguous()),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, WEIGHT, WEIGHT.t() / 40]),
    "addmm in place": lambda x: x[:, :40].clone().addmm_(x, WEIGHT),
    "sigmoid in place": lambda x: x[:, :5].clone().sigmoid_(),
    "sigmoid of torch in place": lambda x: torch.sigmoid_(x[:, :5].clone()),
    "power in place": lambda x: (1 + x[:, :5].square()).pow_(0.1),
    "power assigned": lambda x: operator.ipow(1 + x[:, :5].square(), 0.1),
    "exp2 in place": lambda x: x[:, :5].clone().exp2_(),
    "elu in place": lambda x: F.elu_(x[:, :5].clone()),
    "celu in place": lambda x: F.celu_(x[:, :5].clone(), 0.7),
    "selu in place": lambda x: torch.selu_(x[:, :5].clone()),
    "silu, operator": lambda x: torch.ops.aten.silu(x[:, :5].contiguous()),
    "sum": lambda x: x.repeat(1, 1000).sum(-1, keepdim=True) / 1000,
    "mean": lambda x: torch.mean(x.repeat(1, 1000), dim=-1),
}


BY_KEYWORD = {  # as peft writes some of them
    "linear": (lambda x: F.linear(input=x, weight=WEIGHT.t(), bias=BIAS), lambda x: F.linear(x, WEIGHT.t(), BIAS)),
    "matmul": (lambda x: torch.matmul(input=x, other=WEIGHT), lambda x: torch.matmul(x, WEIGHT)),
    "mm": (lambda x: torch.mm(x, mat2=WEIGHT), lambda x: torch.mm(x, WEIGHT)),
    "bmm": (lambda x: torch.bmm(input=x[None], mat2=WEIGHT[None]), lambda x: torch.bmm(x[None], WEIGHT[None])),
    "addmm": (lambda x: torch.addmm(input=BIAS, mat1=x, mat2=WEIGHT), lambda x: torch.addmm(BIAS, x, WEIGHT)),
    "baddbmm": (
        lambda x: torch.baddbmm(input=BIAS, batch1=x[None], batch2=WEIGHT[None]),
        lambda x: torch.baddbmm(BIAS, x[None], WEIGHT[None]),
    ),
    "sigmoid": (lambda x: torch.sigmoid(input=x), torch.sigmoid),
    "gelu": (lambda x: F.gelu(input=x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "softplus": (lambda x: F.softplus(input=x, beta=2.0), lambda x: F.softplus(x, 2.0)),
    "rsqrt": (lambda x: torch.rsqrt(input=x.abs()), lambda x: torch.rsqrt(x.abs())),
    "silu": (lambda x: F.silu(input=x), F.silu),
}


@pytest.mark.parametrize("name", BY_KEYWORD)
def test_operands_may_be_named(functions, name):
    named, plain = BY_KEYWORD[name]
    x = torch.randn(9, 48)
    with functions:
        assert torch.equal(named(x), plain(x))


@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_has_its_own_bits_in_any_batch_and_torchs_numbers_and_gradients(functions, name):
    function = BY_ROW[name]
    x, x_plain = (torch.randn(9, 48, generator=torch.Generator().manual_seed(3)).requires_grad_() for _ in range(2))
    expected = function(x_plain)
    with functions:
        whole = function(x)
        for rows in (slice(0, 1), slice(3, 9)):
            assert torch.equal(function(x[rows].clone()), whole[rows])
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-5)
    (whole * expected.detach()).sum().backward()
    (expected * expected.detach()).sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad, atol=1e-4, rtol=1e-4)


IN_PLACE = {
    "silu": (F.silu, ()), "mish": (F.mish, ()), "selu": (F.selu, ()), "elu": (F.elu, (0.7,)), "celu": (F.celu, (0.7,)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_activations_in_place_write_to_their_operand(functions, name):
    function, arguments = IN_PLACE[name]
    x = torch.randn(9, 5)
    with functions:
        expected = function(x, *arguments)
        for write in (lambda x: function(x, *arguments, inplace=True), lambda x: function(x, *arguments, True)):
            written = x.clone()
            assert write(written) is written and torch.equal(written, expected)


BY_SHAPE = {  # of operands that few modules have
    "powers into a tensor": lambda x: torch.pow(x.abs(), 1.5, out=torch.empty(9, 48)),
    "a number in exponents": lambda x: 2 ** x.long(),
    "vector with vector": lambda x: torch.matmul(x[0], WEIGHT[:, 0]),
    "vector with matrix": lambda x: x[0] @ WEIGHT,
    "vector with matrices": lambda x: x[0] @ WEIGHT.expand(2, 48, 40),
    "addmm, one number": lambda x: torch.addmm(BIAS[:1], x, WEIGHT),
    "addmm, one scalar": lambda x: torch.addmm(BIAS[0], x, WEIGHT),
    "addmm, one column": lambda x: torch.addmm(x[:, :1], x, WEIGHT),
    "mv into a tensor": lambda x: torch.mv(x, WEIGHT[:, 0], out=torch.empty(9)),
    "addmv, weighed": lambda x: torch.addmv(x[:, 0], x, WEIGHT[:, 0], beta=2, alpha=3),
    "inner with matrices": lambda x: torch.inner(x.view(3, 3, 48), WEIGHT.view(48, 5, 8).permute(1, 2, 0)),
    "inner of numbers": lambda x: torch.inner(x, torch.tensor(2.0)),
    "tensordot over nothing": lambda x: torch.tensordot(x, WEIGHT, 0),
    "tensordot over all": lambda x: torch.tensordot(x, x, 2),
    "bilinear, no bias": lambda x: F.bilinear(x[None], x[None], WEIGHT.view(40, 48, 1).expand(40, 48, 48) / 48),
    "cdist, other norm": lambda x: torch.cdist(x, x + 1, p=1.0),
    "array at tensor": lambda x: torch.Tensor.__rmatmul__(WEIGHT, x),
    "addmm into a tensor": lambda x: torch.addmm(BIAS, x, WEIGHT, out=torch.empty(9, 40)),
    "baddbmm into a tensor": lambda x: torch.baddbmm(BIAS, x[None], WEIGHT[None], out=torch.empty(1, 9, 40)),
}


@pytest.mark.parametrize("name", BY_SHAPE)
def test_products_of_every_shape_that_torch_takes_give_torchs_numbers(functions, name):
    product = BY_SHAPE[name]
    x = torch.randn(9, 48)
    with functions:
        found = product(x)
    assert found.shape == product(x).shape
    torch.testing.assert_close(found, product(x), atol=1e-5, rtol=1e-5)


def test_a_parameter_before_columns_is_the_weight_of_the_invariant_product():
    columns, weights = torch.randn(2, 48, 9), []

    def linear(x, weight, bias=None):
        weights.append(weight)
        return F.linear(x, weight, bias)

    with invariant_functions(linear):
        assert (PARAMETER @ columns).shape == (2, 40, 9)
    assert len(weights) == 1 and weights[0] is PARAMETER


@pytest.mark.parametrize(("width", "num_columns", "num_calls"), [(16, 40, 3), (16, 16, 0), (8, 40, 0), (17, 16, 3)])
def test_many_columns_are_not_added_number_by_number_but_for_few_numbers(width, num_columns, num_calls):
    calls = []

    def linear(x, weight, bias=None):
        calls.append(weight)
        return F.linear(x, weight, bias)

    left, right = torch.randn(3, 5, width), torch.randn(3, width, num_columns)
    with invariant_functions(linear):
        found = torch.matmul(left, right)
    torch.testing.assert_close(found, torch.matmul(left, right), atol=1e-5, rtol=1e-5)
    assert len(calls) == num_calls and all(weight.is_contiguous() for weight in calls)


SOFTMAXES = {
    "F": lambda x: F.softmax(x, 1),
    "F, keywords": lambda x: F.softmax(input=x, dim=-2, _stacklevel=5, dtype=torch.float32),
    "torch": lambda x: torch.softmax(x, 1),
    "torch, dtype": lambda x: torch.softmax(x, 1, torch.float32),
    "special": lambda x: torch.special.softmax(x, 1),
    "Tensor": lambda x: x.softmax(dim=1),
    "module": nn.Softmax(1),
    "last": lambda x: x.softmax(-1),
    "out": lambda x: torch.softmax(x, 1, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_softmax_along_any_dimension_does_not_depend_on_threads_and_rows(functions, name, dtype):
    softmax = SOFTMAXES[name]
    x = torch.randn(63, 12, 71, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(dtype)
    with functions:
        whole = softmax(x)
        assert torch.equal(whole, softmax(x)) and whole.dtype == softmax(x[:1]).dtype
        if name != "out":  # a tensor to write to is left to PyTorch
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                assert torch.equal(softmax(x), whole)
                assert torch.equal(softmax(x[5:18].clone()), whole[5:18])
    torch.testing.assert_close(whole, softmax(x))


def test_products_of_a_small_matrix_for_each_row_are_added_in_order(functions):
    x = torch.randn(9, 3, 4)
    with functions:
        whole, one = x @ SMALL, x[2] @ SMALL[2:3]
    assert torch.equal(whole[2:3], one)
    torch.testing.assert_close(whole, x @ SMALL)


def test_the_slopes_of_softplus_and_mish_are_finite_and_exact_far_from_zero(functions):
    x = torch.tensor([-1e4, -90.0, -20.0, 0.0, 15.0, 25.0, 1e4], requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    for function in (F.softplus, F.mish, F.elu):
        with functions:
            found = torch.autograd.grad(function(x).sum(), x)[0]
        torch.testing.assert_close(found, torch.autograd.grad(function(plain).sum(), plain)[0])


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.bernoulli, torch.Tensor.uniform_, F.dropout], ids=lambda draw: draw.__name__
)
def test_random_numbers_inside_the_module_are_refused_by_name(functions, draw):
    with functions, pytest.raises(ValueError, match=draw.__name__):
        draw(torch.full((3,), 0.5))
    with functions:
        assert torch.equal(F.dropout(WEIGHT, 0.5, False), WEIGHT)


class SigmoidGate(nn.Module):
    """A gate around a linear layer whose own code calls a function of torch. It owns no weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * torch.sigmoid(x[..., :1])


def gated(make_model) -> HostedModel:
    model = make_model("qwen3")
    for layer in model.model.layers:
        layer.mlp = SigmoidGate(layer.mlp)
    return HostedModel.adopt(model, dtype=None, device=None, invariant=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_layers_run_again_with_the_same_numerics_inside_and_after_the_context(
    make_model, reentrant, inside
):
    hosted = gated(make_model)
    module = hosted.module.train()
    ids = torch.tensor([[(7 * i) % 250 for i in range(21)]])

    def gradients() -> list[torch.Tensor]:
        module.zero_grad()
        with hosted.training_numerics():
            loss = module(ids, use_cache=False).logits.logsumexp(-1).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    plain = gradients()
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    module.enable_input_require_grads()
    layer = next(part for part in module.modules() if isinstance(part, GradientCheckpointingLayer))
    own = layer._gradient_checkpointing_func
    assert all(map(torch.equal, gradients(), plain))
    assert layer._gradient_checkpointing_func is own
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_forward_of_the_whole_modules_own_is_kept(make_model):
    hosted = gated(make_model)
    calls = []
    own = hosted.module.forward

    def wrapped(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return own(*args, **kwargs)

    hosted.module.forward = wrapped
    with hosted.training_numerics():
        hosted.module(torch.tensor([[1, 2]]), use_cache=False)
    assert calls == [1] and hosted.module.forward is wrapped


@pytest.mark.slow  # the compiler takes seconds to import
def test_layers_compiled_one_by_one_run_uncompiled_with_the_same_bits(make_model):
    model, compiled = make_model("qwen3"), make_model("qwen3")
    for index, layer in enumerate(compiled.model.layers):
        compiled.model.layers[index] = torch.compile(layer, backend="eager")
    found = []
    for module in (model, compiled):
        engine = Engine(module, EngineConfig(kv_cache="8 blocks"))
        found.append(engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=5, sampling_seed=1))[0].logprobs)
    assert found[0] == found[1]


@pytest.mark.slow  # the compiler takes seconds to import
def test_a_module_compiled_in_place_or_by_its_caller_runs_uncompiled_with_the_same_bits(make_model):
    hosted = gated(make_model)
    module, ids = hosted.module, torch.tensor([[1, 2, 3, 4, 5]])
    with hosted.training_numerics():
        plain = module(ids, use_cache=False).logits
    compiled = torch.compile(module, backend="eager")
    with hosted.training_numerics():
        assert torch.equal(compiled(ids, use_cache=False).logits, plain)
    with pytest.raises(ValueError, match=r"not what torch\.compile makes of it: pass the module itself"):
        HostedModel.adopt(compiled, dtype=None, device=None, invariant=True)
    module.compile(backend="eager")
    own = module._compiled_call_impl
    with hosted.training_numerics():
        assert torch.equal(module(ids, use_cache=False).logits, plain)
    assert own is not None and module._compiled_call_impl is own


def test_the_products_of_a_module_run_outside_the_mode(make_model, monkeypatch):
    hosted = gated(make_model)
    seen = []
    monkeypatch.setattr(
        "lockstep.kernels.linear.linear.native_products",
        lambda *args, **kwargs: (
            seen.append(torch._C._is_torch_function_mode_enabled()) or native_products(*args, **kwargs)
        ),
    )
    with hosted.rollout_phase(), torch.no_grad():
        hosted.module(torch.tensor([[1, 2]]), use_cache=False)
    assert seen and not any(seen)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_callers_autocast_changes_no_bit_of_engine_or_trainer(make_model, caplog, family, dtype):
    operations._tell_of_autocast.cache_clear()
    if family == "gpt2":  # whose norms autocast would compute in float32
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).to(dtype).eval()
    else:
        model = make_model(family, dtype).requires_grad_(True)
    engine = Engine(model, EngineConfig(kv_cache="16 blocks", max_num_seqs=2))
    settings = [SamplingParams(max_new_tokens=6, sampling_seed=3)]
    expected = engine.generate([[1, 2, 3]], settings)[0]
    ids = torch.tensor([[1, 2, 3, *expected.token_ids]])
    with engine.model.training_numerics():
        logits = model(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16 if dtype is torch.float32 else torch.float16):
        assert engine.generate([[1, 2, 3]], settings)[0].logprobs == expected.logprobs
        assert "autocast" not in caplog.text
        with engine.model.training_numerics():
            assert torch.equal(model(input_ids=ids).logits, logits)
    assert caplog.text.count("autocast has no effect inside the numerics of an engine") == 1


def test_an_engine_without_invariant_mode_generates_inside_autocast(make_model):
    engine = Engine(make_model("qwen3"), EngineConfig(kv_cache="16 blocks", max_num_seqs=2, invariant=False))
    settings = [SamplingParams(max_new_tokens=6, sampling_seed=3)]
    expected = engine.generate([[1, 2, 3]], settings)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert engine.generate([[1, 2, 3]], settings)[0].logprobs == expected.logprobs


def test_rotations_by_complex_numbers_have_the_same_bits_for_one_row_and_for_many(functions) -> None:
    """Angles that a product has laid down column by column: those of one row lie side by side."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(16, 40, generator=generator, dtype=torch.float32) * 100  # [D / 2, T]
    query = torch.view_as_complex(torch.randn(40, 4, 16, 2, generator=generator, dtype=torch.float32))

    def rotated(first: int, end: int) -> torch.Tensor:
        its = angles[:, first:end].contiguous().t()
        return torch.view_as_real(query[first:end] * torch.polar(torch.ones_like(its), its)[:, None])

    with functions:
        whole = rotated(0, 40)
        assert all(torch.equal(rotated(row, row + 1), whole[row : row + 1]) for row in range(40))
        assert torch.equal(torch.polar(abs=torch.ones(3), angle=torch.zeros(3)), torch.ones(3, dtype=torch.complex64))
