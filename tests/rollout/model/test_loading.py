"""Model folders that cannot be loaded are refused by what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.integration.explain.runs import load_module
from lockstep.integration.grpo.tasks.arithmetic import build_tokenizer
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.loading import read_config
from lockstep.rollout.sharding.checkpoint_slices import CheckpointSlices
from lockstep.rollout.sharding.shards import Shard
from lockstep.rollout.sharding.skeleton import skeleton_of

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


@pytest.mark.parametrize("load", [lambda folder: Engine(folder, SETTINGS), lambda folder: load_module(folder, "")])
def test_a_folder_of_a_model_and_an_adapter_is_refused(folder, load):
    """One rank would put the adapter in, and several ranks would not."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(ValueError, match=r"holds an adapter beside the model \(adapter_config\.json\).*--lora"):
        load(folder)


def test_code_in_a_folder_is_refused_and_nobody_is_asked(folder, monkeypatch):
    """transformers would ask on standard input, and run the code after a "y"."""
    ran, asked = folder / "ran", list[str]()
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig as OwnConfig\n")
    configure(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    with pytest.raises(
        ValueError, match="the code in a folder is not run: load the model yourself and pass the module"
    ):
        Engine(folder, SETTINGS)
    assert not asked and not ran.exists()


@pytest.mark.parametrize("load", [lambda folder: Engine(folder, SETTINGS), lambda folder: load_module(folder, "")])
def test_an_attention_that_a_configuration_names_needs_no_package(folder, load):
    """The engine puts its own in the place of any."""
    configure(folder, attn_implementation="flash_attention_2")
    load(folder)
    skeleton_of(read_config(folder), torch.float32)  # as ranks that share the model make it


def test_a_rotary_that_is_not_known_is_named(folder):
    configure(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 10000.0})
    with pytest.raises(ValueError, match="names the rope_type 'spiral', which is not known"):
        Engine(folder, SETTINGS)


def test_a_model_without_layers_is_refused(folder):
    configure(folder, num_hidden_layers=0, layer_types=[])
    with pytest.raises(ValueError, match="Qwen2ForCausalLM cannot be hosted: num_hidden_layers 0: it has no layers"):
        Engine(folder, SETTINGS)


def sharded(folder: Path) -> dict[str, str]:
    """Write the weights as two files with an index; return the table of the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        some = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(some, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (SECOND, lambda data: data[:-4], rf"{SECOND} is cut: \d+ bytes and not \d+"),
        (SECOND, lambda data: data[:20], rf"{SECOND} is cut: 20 bytes, and its header alone ends at"),
        (SECOND, lambda data: b"", f"{SECOND} is empty"),
        (SECOND, lambda data: data + b"x", f"{SECOND} is too long"),
        (SECOND, lambda data: b"\xff" * 64, f"{SECOND} is no safetensors file"),
        (SECOND, lambda data: data[:8] + b"?" * (len(data) - 8), f"{SECOND} is no safetensors file: its header is dam"),
        (SECOND, lambda data: b"version https://git-lfs.github.com/spec/v1\n", f"{SECOND} is a pointer of Git LFS"),
        (SECOND, lambda data: None, f"{SECOND} cannot be read: No such file"),
        (INDEX, lambda data: data[:-20], f"{INDEX} cannot be read as JSON"),
        (INDEX, lambda data: b"", f"{INDEX} cannot be read as JSON: it is empty"),
        (INDEX, lambda data: b"[]", f"{INDEX} is no JSON object"),
        (INDEX, lambda data: b"{}", f"{INDEX} has no table weight_map"),
        (INDEX, lambda data: data.replace(b'"metadata"', b'"other"'), f"{INDEX} has no table metadata"),
        (
            INDEX,
            lambda data: data.replace(SECOND.encode(), b"config.json"),
            f"{INDEX} names config.json, which is",
        ),
        ("config.json", lambda data: b"null", "config.json is no JSON object"),
        ("tokenizer.json", lambda data: data[:-20], "tokenizer.json cannot be read as JSON: .* column"),
        ("tokenizer_config.json", lambda data: b"", "tokenizer_config.json cannot be read as JSON: it is empty"),
        # transformers passes over it, and with it over the tokens that end an answer.
        ("generation_config.json", lambda data: data[:-5], "generation_config.json cannot be read as JSON"),
    ],
)
def test_the_damaged_file_of_a_folder_is_named(folder, name, damage, says):
    sharded(folder)
    build_tokenizer().save_pretrained(folder)
    path = folder / name
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"model folder .* cannot be loaded: {says}"):
        Engine(folder, SETTINGS)


def test_a_part_of_a_model_is_read_from_the_file_that_the_whole_one_is_read_from(folder):
    """A folder may have a single file beside an index, of other weights."""
    whole = load_file(folder / "model.safetensors")
    files = sharded(folder)
    save_file({name: tensor + 1 for name, tensor in whole.items()}, folder / "model.safetensors", {"format": "pt"})
    read = load_module(folder, "")
    with CheckpointSlices(folder, read) as slices:
        parameter = next(parameter for name, parameter in read.named_parameters() if name == Q)
        assert torch.equal(slices.read(Q, Shard.whole(tuple(parameter.shape))), parameter)
    assert Q in files
