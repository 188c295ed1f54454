"""Modules that a trainer has around, and settings of the wrong kind: each is hosted, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3Model

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.request_options import RequestOptions
from lockstep.tests.rollout.engine.callers import assert_idle, sampled
from lockstep.tests.support.bpe_tokenizer import train_tokenizer

SMALL = EngineConfig(kv_cache="16 blocks")


class Policy(nn.Module):
    """A trainer's own module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.actor = model


def refusal(model: object, **arguments: object) -> str:
    with pytest.raises(ValueError) as refused:  # the text is what a test compares
        Engine(model, SMALL, **arguments)  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.parametrize(("wrap", "place"), [(nn.DataParallel, "module"), (Policy, "actor"), (nn.Sequential, "0")])
def test_a_wrapper_is_refused_with_the_attribute_to_pass_instead(make_model, wrap, place):
    wrapper = wrap(make_model("qwen3"))
    assert refusal(wrapper).endswith(f"not {wrap.__name__}: pass the model inside it, its attribute .{place}")
    assert Engine(wrapper.get_submodule(place), SMALL).generate([[1, 2]], sampled())[0].token_ids


def test_ddp_and_sharded_modules_are_refused_on_one_rank_with_what_to_do(make_model, run_world):
    def shards(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:  # type: ignore[attr-defined, union-attr]
            fully_shard(layer)
        return fully_shard(model)  # type: ignore[return-value]

    wraps: list[Callable[[nn.Module], nn.Module]] = [
        DistributedDataParallel, shards, lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    ]  # fmt: skip

    def on_rank(rank: int) -> list[str]:
        assert dist.get_world_size() == 1
        return [refusal(wrap(make_model("qwen3"))) for wrap in wraps]

    [[ddp, sharded, flat]] = run_world(1, on_rank)
    assert ddp.endswith("not DistributedDataParallel: pass the model inside it, its attribute .module")
    assert "FSDPQwen3ForCausalLM is sharded by fully_shard or another plan of DTensors" in sharded
    assert "its ranks hold flat pieces of the weights" in flat
    assert all("Make an engine with weights of its own, Engine(folder)" in text for text in (sharded, flat))


def test_a_model_without_weights_is_refused(make_model):
    assert "has no weights yet: model.embed_tokens.weight, " in refusal(make_model("qwen3").to("meta"))
    partitioned = make_model("qwen3")
    partitioned.lm_head.weight.ds_id = 7
    assert "Qwen3ForCausalLM is partitioned by DeepSpeed, so no rank holds its weights whole" in refusal(partitioned)


class Halves(torch.Tensor):
    """A quantised tensor, as torchao makes them: it acts as one of float32, and has no memory of that size."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)

    def __init__(self, whole: torch.Tensor):
        self.half = whole.half()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        plain = [one.half.float() if isinstance(one, cls) else one for one in args]
        result = function(*plain, **(kwargs or {}))
        return cls(result) if function is torch.ops.aten.detach.default else result


def test_quantised_weights_are_refused_by_name(make_model):
    model, lately, packed = make_model("qwen3"), make_model("qwen3"), make_model("qwen3")
    engine = Engine(lately, SMALL)
    for one in (model, lately):
        weight = one.model.layers[0].mlp.up_proj.weight
        one.model.layers[0].mlp.up_proj.weight = nn.Parameter(Halves(weight.detach()), requires_grad=False)
    begin = "Qwen3ForCausalLM has quantised weights, or others that kernels cannot read: "
    assert f"{begin}model.layers.0.mlp.up_proj.weight (Halves). The engine computes" in refusal(model)
    with pytest.raises(ValueError, match=r"up_proj.weight \(the first is torch.float32 .* on cpu and Halves and was"):
        engine.generate([[1, 2]], sampled())  # its kernels would read the memory that is not there
    layer = packed.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)  # as of bitsandbytes
    assert f"{begin}model.layers.0.mlp.up_proj.weight (torch.int8). " in refusal(packed)
    dynamic = torch.ao.quantization.quantize_dynamic(make_model("qwen3"), {nn.Linear}, dtype=torch.qint8)
    assert f"{begin}model.layers.0.self_attn.q_proj (torch.ao.nn.quantized.dynamic.modules.li" in refusal(dynamic)


def test_what_a_configuration_or_class_lacks_is_named(make_model):
    model = make_model("qwen3")
    assert "Qwen3Model cannot be hosted: no head that gives logits" in refusal(model.model)
    model.config.return_dict = False
    assert "cannot be hosted: return_dict=False in its configuration" in refusal(model)


def test_parameters_of_integers_do_not_tell_the_models_dtype(make_model):
    model, plain = make_model("qwen3"), make_model("qwen3")
    counts = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
    model._parameters["counts"] = counts  # before all others
    assert next(model.parameters()) is counts
    found = [Engine(one, SMALL).generate([[1, 2]], sampled())[0].logprobs for one in (model, plain)]
    assert found[0] == found[1]


class ForeignModel(Qwen3Model):
    """A model that refuses its arguments itself."""

    def forward(self, *args: object, **kwargs: object):
        raise ValueError("`mm_token_type_ids` is required")


def test_a_value_error_of_the_models_own_code_names_the_model_and_is_the_cause(make_model):
    model = make_model("qwen3")
    model.model.__class__ = ForeignModel
    with pytest.raises(
        ValueError, match=r"^Qwen3ForCausalLM cannot be hosted: its forward fails on .*: ValueError: `mm_token"
    ) as refused:
        Engine(model, SMALL)
    assert str(refused.value.__cause__) == "`mm_token_type_ids` is required"


def test_a_layer_of_another_dtype_is_refused_by_the_models_name(make_model):
    model = make_model("qwen3")
    model.lm_head.to(torch.bfloat16)
    assert refusal(model).startswith("Qwen3ForCausalLM cannot be hosted: its forward fails")


class NoisyMLP(Qwen3MLP):
    """An MLP that adds noise, in train mode alone or always."""

    always = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x + torch.randn_like(x) if self.training or self.always else x


class AlwaysNoisyMLP(NoisyMLP):
    always = True


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (NoisyMLP, "differ from the engine's: switch that off, or call eval()"),
        (AlwaysNoisyMLP, "differ from the engine's, in eval mode too: switch that off"),
    ],
)
def test_eval_is_advised_only_where_it_ends_the_draws(make_model, kind, remedy):
    model = make_model("qwen3").train()
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
    assert refusal(model).endswith(remedy)


@pytest.mark.slow  # the compiler takes seconds to import
@pytest.mark.parametrize("when", ["before", "after"])
def test_forwards_that_were_compiled_run_uncompiled_with_the_same_bits(make_model, when):
    model = make_model("qwen3")
    engine = Engine(model, SMALL)
    expected = engine.generate([[1, 2, 3]], sampled())[0].logprobs
    parts = [*model.model.layers, model.model.layers[0].mlp.up_proj]
    for part in parts:
        part.forward = torch.compile(part.forward, backend="eager")
    compiled = [part.forward for part in parts]
    if when == "before":
        engine = Engine(model, SMALL)
    assert engine.generate([[1, 2, 3]], sampled())[0].logprobs == expected
    assert [part.forward for part in parts] == compiled


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.tensor([1, 2]), r"not Tensor tensor\(\[1, 2\]\): tolist\(\) makes a list of it"),
        ([torch.tensor([1, 2])], r"not Tensor tensor\(\[1, 2\]\): tolist\(\) makes a list of it"),
        ({1, 2}, r"not set \{1, 2\}$"),
        ({"input_ids": [[1, 2]]}, "pass the lists in input_ids"),
        ([{"role": "user", "content": "Hello"}], "chat template"),
    ],
    ids=str,
)
def test_a_prompt_of_another_form_is_refused_with_the_remedy(make_engine, prompt, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, sampled())
    assert_idle(engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": "greedy"}, "sampling parameters are SamplingParams or a mapping, not 'greedy'"),
        ({"sampling_params": RequestOptions}, "sampling parameters are SamplingParams or a mapping, not <class"),
        ({"options": {"top_logprobs_num": 2}}, "options are RequestOptions, not {'top_logprobs_num': 2}"),
    ],
    ids=str,
)
def test_settings_of_another_kind_are_refused(make_engine, arguments, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2]], **arguments)
    assert_idle(engine)


def test_arguments_of_an_engine_of_another_kind_are_refused(make_model):
    model = make_model("qwen3")
    with pytest.raises(ValueError, match=r"an engine's config is an EngineConfig, not {'seed': 1}: see EngineConfig"):
        Engine(model, {"seed": 1})
    with pytest.raises(ValueError, match='device must be one such as "cpu", "cuda" or "cuda:1", not \'gpu\''):
        Engine(model, EngineConfig(device="gpu"))
    with pytest.raises(ValueError, match="kv_cache is -5, but a pool needs at least one block"):
        EngineConfig(kv_cache=-5)
    assert "a tokenizer is one of transformers', as AutoTokenizer loads it, not 'gpt2'" in refusal(
        model, tokenizer="gpt2"
    )
    library = train_tokenizer().backend_tokenizer
    assert "a tokenizer is one of transformers', as AutoTokenizer loads it, not Tokenizer(" in refusal(
        model, tokenizer=library
    )
    assert "there is no model folder 'Qwen/Qwen3-0.6B'" in refusal("Qwen/Qwen3-0.6B")


def test_a_device_that_is_not_there_is_refused_before_a_folder_is_loaded(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"device is 'cuda:99', but PyTorch .* finds \d+ GPUs here"):
        Engine(tmp_path, EngineConfig(device="cuda:99"))
    for other in ("meta", "mps"):
        with pytest.raises(ValueError, match=f'such as "cpu", "cuda" or "cuda:1", not {other!r}'):
            Engine(tmp_path, EngineConfig(device=other))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_default_device_of_the_trainers_changes_no_bit(make_model, family):
    model = make_model(family)
    expected = Engine(model, SMALL).generate([[1, 2, 3]], sampled())[0].logprobs
    with torch.device("meta"):  # stands for a GPU: what is made there by mistake cannot be read
        engine = Engine(model, SMALL)
        assert engine.generate([[1, 2, 3]], sampled())[0].logprobs == expected
        assert torch.zeros(1).is_meta
        engine.close()
