"""Tests of the start-up benchmark: what a process measures, that it is a new one, and the arithmetic of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.integration.bench import startup
from lockstep.integration.bench.parts import startup_process
from lockstep.integration.bench.parts.presets import save_llama
from lockstep.integration.cli.main import main as cli

WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_llama(folder, WIDTHS, torch.bfloat16)
    return folder


def settings(folder: Path) -> dict[str, object]:
    return {"folder": str(folder), "dtype": "bfloat16", "threads": 1, "prompt_tokens": 8, "started": 0.0}


def test_the_folder_is_a_model_of_the_widths_in_that_dtype(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.num_hidden_layers == 2 and model.lm_head.weight.shape == (96, 32)


def test_the_default_model_has_the_parameters_of_smollm2_135m():
    shape = startup._SHAPE
    width, kv_width = shape["hidden_size"], shape["hidden_size"] // 9 * 3
    layer = 2 * width * (width + kv_width) + 3 * width * shape["intermediate_size"] + 2 * width
    num_parameters = shape["vocab_size"] * width + shape["num_hidden_layers"] * layer + width
    assert num_parameters == 134_515_008


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("kind", startup_process.KINDS)
def test_a_start_of_each_kind_draws_a_token(folder, bpe_tokenizer, tmp_path, restore_threads, kind, with_tokenizer):
    if with_tokenizer:
        wide = {**WIDTHS, "vocab_size": len(bpe_tokenizer)}
        save_llama(tmp_path, wide, torch.bfloat16)
        bpe_tokenizer.save_pretrained(tmp_path)
        folder = tmp_path
    found = startup_process.main(kind, settings(folder))
    assert found["first_token_s"] == pytest.approx(found["load_s"] + found["token_s"])
    assert 0 < found["load_s"] < found["first_token_s"] < found["process_s"]


@pytest.mark.slow
def test_one_start_is_a_process_and_its_failure_is_told(folder, tmp_path):
    seconds = startup.one_start("ours", {**settings(folder), "folder": str(folder)})
    assert 0 < seconds["first_token_s"] < seconds["process_s"]  # imports are not in the first
    with pytest.raises(ValueError, match=r"a process of transformers failed: .*config\.json"):
        startup.one_start("transformers", settings(tmp_path))


def test_the_report_has_medians_of_the_pairs(capsys):
    def one(load: float, token: float) -> dict[str, float]:
        return {"load_s": load, "token_s": token, "first_token_s": load + token, "process_s": load + token + 3}

    found = {
        "ours": [one(1, 0.5), one(2, 1), one(1.5, 0.5)],
        "transformers": [one(0.5, 0.5), one(1, 1), one(0.5, 0.5)],
        "unkept": [one(3, 1), one(3, 2), one(2, 1)],
    }
    report = startup.report(found)
    assert report["ours_s"] == 2 and report["transformers_s"] == 1 and report["unkept_s"] == 4
    assert report["ratio"] == 1.5 and report["passed"]  # 1.5, 1.5 and 2
    assert report["process_ratio"] == pytest.approx(1.2) and report["ours_process_s"] == 5
    assert report["parts"]["transformers_token_s"] == 0.5
    assert not startup.report({**found, "ours": found["unkept"]})["passed"]
    json.dumps(report)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path, capsys):
    assert cli(["bench", "startup", "--model", str(tmp_path)]) != 0
    assert f"--model '{tmp_path}' holds no config.json" in capsys.readouterr().err
