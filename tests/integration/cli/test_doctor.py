"""Tests of `lockstep doctor --model`."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from lockstep.integration.cli import doctor
from lockstep.integration.cli import main as cli


def test_doctor_prints_the_verdict_on_a_model_or_the_reason_of_its_refusal(make_model, tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path / "good")
    assert doctor.run(["--model", str(tmp_path / "good")]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "Qwen3ForCausalLM: equal bits whole and in pieces, " in verdict and "18 tokens" in verdict
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=32)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bad")
    assert doctor.run(["--model", str(tmp_path / "bad")]) == 1
    assert "XLNetLMHeadModel cannot be hosted: attention that does not go through" in capsys.readouterr().out


def test_doctor_says_what_a_folder_lacks(tmp_path, capsys):
    assert doctor.run(["--model", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", lambda data: data[:-20]),
        ("config.json", lambda data: data.replace(b'"silu"', b'"no such function"')),
        ("config.json", lambda data: data.replace(b'"vocab_size": ', b'"vocab_size": 1')),
        ("model.safetensors", lambda data: data[:1000]),
        ("model.safetensors", lambda data: b""),
    ],
    ids=["cut config", "activation", "sizes", "cut weights", "empty weights"],
)
def test_doctor_names_a_folder_whose_files_cannot_be_loaded(make_model, tmp_path, capsys, name, change):
    make_model("qwen3").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / name
    before = file.read_bytes()
    file.write_bytes(change(before))
    assert file.read_bytes() != before
    assert doctor.run(["--model", str(tmp_path / "model")]) == 1
    assert f"model folder '{tmp_path / 'model'}' cannot be loaded: " in capsys.readouterr().out


def test_weights_that_give_no_numbers_are_named(make_model, tmp_path, capsys):
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    assert doctor.run(["--model", str(tmp_path)]) == 1
    assert "Qwen3ForCausalLM: not checked: its logits are NaN or infinite" in capsys.readouterr().out
    assert cli.main(["warm", "--model", str(tmp_path), "--engine", "kv_cache=16 blocks", "max_num_seqs=1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lockstep: error: the model's logits are NaN or infinite")
    file = tmp_path / "sequence.json"
    file.write_text('{"prompt_ids": [1, 2, 3], "token_ids": [4]}')
    assert cli.main(["explain", str(file), "--model", str(tmp_path)]) == 3
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lockstep: error: the model's logits are NaN or infinite")


def test_a_model_larger_than_memory_is_said_in_one_line(make_model, tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 10**13}))
    assert cli.main(["warm", "--model", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("lockstep: error: out of memory: ")


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)
