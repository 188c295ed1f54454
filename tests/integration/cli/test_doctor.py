"""Tests of `lockstep doctor --model`."""

from __future__ import annotations

import pytest
import transformers

from lockstep.integration.cli import doctor


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


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    import torch

    torch.set_num_threads(1)
