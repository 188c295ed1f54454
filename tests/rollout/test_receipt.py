"""The guarantee of a receipt and its canonical form."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import canonical, differences, float_bits, guarantee, sha256_of


@pytest.fixture
def engine(make_model, restore_threads):
    torch.set_num_threads(1)
    return lambda *given, **config: Engine(make_model(*given), EngineConfig(kv_cache="8 blocks", **config))


def test_equal_engines_give_equal_guarantees_of_plain_values(engine):
    first, second = (guarantee(engine("qwen3").model) for _ in range(2))
    assert first == second == json.loads(json.dumps(first))
    assert first["dtype"] == "float32" and first["invariant"] and first["draws"] >= 2 and first["k_blocks"] == 1
    assert differences(first, second) == []
    assert set(first["versions"]) == {"lockstep", "torch", "transformers"}


def test_what_changes_bits_changes_the_guarantee_and_is_named(engine):
    here = guarantee(engine("qwen3").model)

    def names(other: dict) -> set[str]:
        return {line.split(":")[0] for line in differences(other, here)}

    assert names(guarantee(engine("qwen3", k_blocks=4).model)) == {"k_blocks"}
    assert names(guarantee(engine("llama").model)) == {"model"}
    assert {"invariant", "linear"} <= names(guarantee(engine("qwen3", invariant=False).model))
    assert names({**here, "versions": {**here["versions"], "torch": "0.1"}}) == {"versions.torch"}
    assert differences({**here, "isa": "amx"}, here) == [f"isa: amx there, {here['isa']} here"]


def test_an_infinity_in_the_configuration_is_hashed_as_text(engine):
    """`time_step_limit` of state-space models is (0, inf)."""
    models = [engine("falcon_h1").model for _ in range(3)]
    here = models[0].config.to_dict()
    assert float("inf") in [one for value in here.values() if isinstance(value, list | tuple) for one in value]
    models[2].config.time_step_limit = (0.0, 1e9)
    hashes = [guarantee(model)["model"] for model in models]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_hash_of_a_configuration_stays_as_it_was(engine):
    model = engine("qwen3").model
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures",
               "output_attentions", "output_hidden_states", "return_dict", "problem_type"}  # fmt: skip
    config = {name: value for name, value in model.config.to_dict().items() if name not in ignored}
    plain = json.loads(json.dumps(config, default=str))
    assert guarantee(model)["model"] == sha256_of([type(model.module).__name__, plain])


def test_threads_count_only_where_the_library_multiplies(engine):
    native = engine("qwen3")
    assert guarantee(native.model)["threads"] == (0 if native.model.numerics.guarantee.linear == "native" else 1)
    assert guarantee(engine("qwen3", invariant=False).model)["threads"] == 1


@pytest.mark.slow
def test_a_lower_isa_level_is_another_guarantee(engine):
    program = """
import torch
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.receipt import guarantee
from lockstep.tests.support.random_models import random_model
import json
torch.set_num_threads(1)
print(json.dumps(guarantee(Engine(random_model("qwen3"), EngineConfig(kv_cache="8 blocks")).model)))
"""
    command, environment = [sys.executable, "-c", program], {**os.environ, "LOCKSTEP_MAX_ISA": "plain"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    other, here = json.loads(done.stdout.splitlines()[-1]), guarantee(engine("qwen3").model)
    if here["isa"] in ("", "plain"):
        pytest.skip("this processor has no level above")
    assert any(line.startswith(("isa:", "linear:")) for line in differences(other, here))


def test_the_canonical_form_is_one_for_equal_values():
    assert canonical({"b": [1, 2], "a": "ä"}) == b'{"a":"\\u00e4","b":[1,2]}'
    assert sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1}) != sha256_of({"a": 1, "b": 3})
    with pytest.raises(ValueError):
        canonical(float("nan"))


def test_log_probabilities_keep_their_bits():
    values = [*torch.randn(1000).tolist(), 0.0, -0.0, -1e-45, -3.4e38]
    assert (
        torch.tensor(float_bits(values), dtype=torch.uint32).view(torch.float32).tolist()
        == torch.tensor(values).tolist()
    )
    assert float_bits([-0.0, 0.0]) == [1 << 31, 0]


def test_a_kernel_that_could_not_be_compiled_is_named(engine, monkeypatch):
    """Its bits are others than PyTorch's: a replay called true samples false."""
    model = engine("qwen3").model
    here = guarantee(model)
    assert "lacks" not in here
    failed = {"layers/rms_norm.cpp": native.BuildFailed("no memory"), "machine/play.cpp": native.BuildFailed("too")}
    monkeypatch.setattr(native, "_loaded", {**native._loaded, **failed})
    assert differences(here, guarantee(model)) == ["lacks: None there, ['rms_norm'] here"]
