"""Model folders that cannot be loaded are refused by what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.integration.explain.runs import load_module
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

Q = "model.layers.0.self_attn.q_proj.weight"
SETTINGS = EngineConfig(kv_cache="4 blocks")


@pytest.fixture
def folder(make_model, tmp_path) -> Path:
    make_model("qwen2").save_pretrained(tmp_path)  # tied embeddings: the file has no lm_head.weight
    return tmp_path


def change(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Write the weights with these in place of others; None: without it."""
    tensors = {**load_file(folder / "model.safetensors"), **changed}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("load", [lambda folder: Engine(folder, SETTINGS), lambda folder: load_module(folder, "")])
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({Q: None}, f"it lacks {Q}"),
        ({"model.embed_tokens.weight": None}, "it lacks .*embed_tokens.weight"),
        ({Q: torch.zeros(128, 32)}, rf"{Q} is \[128, 32\] and not \[128, 64\]"),
    ],
)
def test_weights_that_would_be_random_are_refused_by_name(folder, changed, says, load):
    """transformers gives them random values, others in each process."""
    change(folder, changed)
    with pytest.raises(ValueError, match=rf"model folder .* cannot be loaded: {says}"):
        load(folder)


def test_more_layers_than_the_file_has_are_refused(folder):
    configure(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ValueError, match=r"it lacks model\.layers\.2\..* and \d+ more"):
        Engine(folder, SETTINGS)


def test_weights_that_the_model_does_not_have_are_left_out(folder):
    change(folder, {"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)})  # of a head for several tokens, say
    [answer] = Engine(folder, SETTINGS).generate([1, 2], {"max_new_tokens": 2})
    assert answer.num_completion_tokens == 2


@pytest.mark.parametrize(
    "values",
    [
        *({"num_attention_heads": 0}, {"num_attention_heads": "two"}, {"rms_norm_eps": "x"}),
        *({"num_hidden_layers": 5}, {"model_type": "none"}),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused_with_its_folder(folder, values):
    configure(folder, **values)
    with pytest.raises(ValueError, match=r"model folder .* cannot be loaded: "):
        Engine(folder, SETTINGS)


@pytest.mark.parametrize("load", [lambda folder: Engine(folder, SETTINGS), lambda folder: load_module(folder, "")])
@pytest.mark.parametrize("method", ["gptq", "fp8", "mxfp4", "of no known name"])
def test_quantised_weights_are_refused_by_the_name_of_their_kind(folder, method, load):
    """transformers asks for a package, or dequantises, or skips what it does not know: each in its own words."""
    configure(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ValueError, match=rf"holds quantised weights \(quantization_config .* quant_method '{method}'"):
        load(folder)
