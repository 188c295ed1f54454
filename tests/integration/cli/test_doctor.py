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
    config = transformers.DiffLlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "bad")
    assert doctor.run(["--model", str(tmp_path / "bad")]) == 1
    assert (
        "DiffLlamaForCausalLM cannot be hosted: layers [0, 1] call their attention 2 times" in capsys.readouterr().out
    )


def test_doctor_says_what_a_folder_lacks(tmp_path, capsys):
    assert doctor.run(["--model", str(tmp_path)]) == 1
    assert "holds no config.json" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    import torch

    torch.set_num_threads(1)
