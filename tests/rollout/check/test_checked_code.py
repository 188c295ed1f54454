"""Tests of the description that a kept verdict is found by: it follows the module's code and shape, not its weights."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from lockstep.rollout.check import checked_code, module_check
from lockstep.rollout.check.checked_code import describe_module
from lockstep.rollout.check.module_check import check_hosted
from lockstep.rollout.model.hosted_model import HostedModel


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def hosted(model: nn.Module) -> HostedModel:
    return HostedModel.adopt(model, dtype=None, device=None, invariant=True)


def described(model: nn.Module) -> str | None:
    found = describe_module(hosted(model))
    return None if found is None else repr(found)


def test_modules_of_equal_configuration_and_code_have_one_description_whatever_their_weights(make_model):
    first, second = make_model("qwen3"), make_model("qwen3")
    with torch.no_grad():
        second.lm_head.weight.mul_(2)
    second.config._name_or_path = "another/folder"
    assert described(first) == described(second) is not None


CHANGES: dict[str, Callable[[Qwen3ForCausalLM], object]] = {
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "plain attribute": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    "mode": lambda model: model.model.layers[0].train(),
    "gradients": lambda model: model.lm_head.weight.requires_grad_(False),
    "class": lambda model: setattr(model.model.layers[0].mlp, "__class__", OtherMLP),
}


class OtherMLP(Qwen3MLP):
    """A class of another name."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_module_changes_its_description(make_model, change):
    model = make_model("qwen3")
    before = described(model)
    CHANGES[change](model)
    assert described(model) not in (before, None)


def test_a_function_that_was_put_into_a_class_changes_the_description(make_model, monkeypatch):
    model = make_model("qwen3")
    before = described(model)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda self, x: self.weight * x)
    patched = described(model)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda self, x: self.weight + x)
    assert len({before, patched, described(model)}) == 3


def test_a_change_of_the_file_of_a_class_changes_the_description(make_model, tmp_path, monkeypatch):
    file, seen = tmp_path / "of_a_user.py", []
    for text in ("'''One.'''", "'''Two.'''", "'''One.'''"):
        file.write_text(f"from {Qwen3MLP.__module__} import Qwen3MLP\n\nclass Own(Qwen3MLP):\n    {text}\n")
        spec = importlib.util.spec_from_file_location("of_a_user", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "of_a_user", module)
        spec.loader.exec_module(module)
        checked_code._digest.cache_clear()  # a process reads a file once
        model = make_model("qwen3")
        model.model.layers[0].mlp.__class__ = module.Own
        seen.append(described(model))
    assert seen[0] == seen[2] != seen[1]


def test_a_module_that_no_file_tells_has_no_description(make_model):
    with_hook = make_model("qwen3")
    with_hook.model.layers[0].register_forward_hook(lambda module, inputs, out: None)
    assert described(with_hook) is None
    of_no_file: dict[str, type] = {"__name__": "__main__", "Qwen3MLP": Qwen3MLP}  # type: ignore[dict-item]
    exec("class Mine(Qwen3MLP):\n    def forward(self, x):\n        return super().forward(x)\n", of_no_file)
    typed = make_model("qwen3")
    typed.model.layers[0].mlp.__class__ = of_no_file["Mine"]
    assert described(typed) is None


def test_an_instance_with_a_forward_of_its_own_has_no_description(make_model):
    model = make_model("qwen3")
    found = hosted(model)
    model.model.norm.forward = model.model.norm.forward
    assert describe_module(found) is None


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model) -> Path:
    """Keep verdicts in a folder of the test's, with nothing remembered. The kernels are loaded before."""
    check_hosted(hosted(make_model("qwen3")))
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "1")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module_check, "_known", {})
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_check, "_known", {})


def test_a_verdict_is_read_by_the_next_process_and_a_module_of_other_code_is_checked(
    make_model, kept_in, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger=module_check.__name__)
    first = check_hosted(hosted(make_model("qwen3")))
    forget(monkeypatch)
    assert check_hosted(hosted(make_model("qwen3"))) == first
    assert caplog.text.count("kept from an earlier process") == 1 and len(list(kept_in.glob("module-*"))) == 1
    faulty = make_model("qwen3")
    faulty.model.layers[0].mlp.__class__ = ScaledByLength
    with pytest.raises(ValueError, match="ScaledByLength"):
        check_hosted(hosted(faulty))
    assert len(list(kept_in.glob("module-*"))) == 1


class ScaledByLength(Qwen3MLP):
    """An MLP whose result depends on the number of tokens in the call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + x.shape[1] / 100)


def test_a_check_that_is_asked_for_anew_reads_nothing(make_model, kept_in, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger=module_check.__name__)
    check_hosted(hosted(make_model("qwen3")))
    forget(monkeypatch)
    check_hosted(hosted(make_model("qwen3")), anew=True)
    assert "kept from an earlier process" not in caplog.text


def test_a_module_that_could_not_be_checked_leaves_no_verdict(make_model, kept_in):
    model = make_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    verdict = check_hosted(hosted(model))
    assert verdict is not None and verdict.difference is None
    assert not list(kept_in.glob("module-*"))


@pytest.mark.slow
def test_the_second_engine_of_a_folder_in_another_process_runs_no_check(tmp_path, monkeypatch):
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=128, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("LOCKSTEP_KEPT_CHECKS", "1")
    monkeypatch.setenv("LOCKSTEP_NATIVE", "0")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    runs = [
        subprocess.run([sys.executable, "-c", GENERATE, str(tmp_path / "model")], capture_output=True, text=True,
                       check=True)
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0].stdout == runs[1].stdout
    assert ["check of Qwen3ForCausalLM, kept" in run.stderr for run in runs] == [False, True]
    assert ["check of Qwen3ForCausalLM: equal bits" in run.stderr for run in runs] == [True, False]


GENERATE = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from lockstep import Engine, EngineConfig, SamplingParams
engine = Engine(sys.argv[1], EngineConfig(kv_cache="8 blocks"))
[done] = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, sampling_seed=1))
print(done.token_ids, done.logprobs)
"""
