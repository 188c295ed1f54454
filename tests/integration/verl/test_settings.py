"""verl's settings as the command of a server, and the tensors that leave its trainer."""

import sys
import types

import pytest
import torch

from lockstep.integration.cli.arguments.settings import read_settings
from lockstep.integration.verl.outgoing import Outgoing
from lockstep.integration.verl.settings import refuse_settings, serve_command
from lockstep.rollout.config import EngineConfig
from lockstep.tests.support.random_models import random_model


class Config(dict):
    """A stand-in for verl's RolloutConfig, whose fields are attributes and can be asked for by name."""

    __getattr__ = dict.__getitem__


def config(**changed):
    plain = {
        "dtype": "bfloat16", "max_num_seqs": 1024, "max_num_batched_tokens": 512, "max_model_len": None,
        "enable_prefix_caching": True, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1, "expert_parallel_size": 1, "seed": 3, "engine_kwargs": {}, "quantization": None,
        "quantization_config_file": None, "enable_rollout_routing_replay": False, "ignore_eos": False, "mtp": None,
        "disaggregation": types.SimpleNamespace(enabled=False),
    }  # fmt: skip
    return Config(plain | changed)


def model_config(**settings):
    return types.SimpleNamespace(local_path="/models/x", hf_config=types.SimpleNamespace(**settings))


def engine_of(command):
    return dict(flag.split("=", 1) for flag in command[command.index("--engine") + 1 :])


def test_the_settings_of_a_rollout_are_those_of_an_engine():
    command = serve_command(config(), model_config(), "10.0.0.1")
    assert command[:5] == [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model"]
    assert "--until-eof" in command and command[command.index("--host") + 1] == "10.0.0.1"
    engine = engine_of(command)
    assert engine["max_num_batched_tokens"] == "1024" and "max_model_len" not in engine  # a full batch fits in a step
    assert set(engine) <= set(EngineConfig.__dataclass_fields__)


def test_the_engines_own_settings_and_its_interpreter_come_first():
    own = {"python": "/other/python", "kv_cache": "4GiB", "dtype": "float32", "speculation": {"past": 4}}
    command = serve_command(config(engine_kwargs={"lockstep": own}), model_config(), "::1")
    assert command[0] == "/other/python"
    assert (engine_of(command)["kv_cache"], engine_of(command)["dtype"]) == ("4GiB", "float32")
    given = read_settings("--engine", command[command.index("--engine") + 1 :])
    assert EngineConfig.from_dict(given).speculation == {"past": 4}
    assert own["python"] == "/other/python"  # which is left as it was


def test_several_ranks_are_started_by_torchrun_and_sum_in_as_many_blocks_as_the_trainer():
    divided = config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    command = serve_command(divided, model_config(lockstep_k_blocks=2), "10.0.0.1")
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert [engine_of(command)[name] for name in ("tp", "pp", "k_blocks")] == ["2", "2", "2"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quantization": "fp8"}, "quantization=fp8"),
        ({"enable_rollout_routing_replay": True}, "enable_rollout_routing_replay=True"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"disaggregation": types.SimpleNamespace(enabled=True)}, "disaggregation"),
        ({"mtp": types.SimpleNamespace(enable=True, enable_rollout=True)}, "mtp"),
    ],
)
def test_settings_that_would_change_what_is_drawn_are_refused_by_name(changed, named):
    refuse_settings(config())
    with pytest.raises(NotImplementedError, match=named):
        refuse_settings(config(**changed))


def test_tensors_leave_in_the_engines_dtype_and_tied_ones_once():
    module = random_model("qwen3", tie_word_embeddings=True)
    outgoing = Outgoing.of(module.config, torch.bfloat16)
    weights = [*module.named_parameters(remove_duplicate=False), ("step", torch.tensor(3))]
    sent = dict(outgoing.tensors(weights))
    assert set(sent) == {name for name, _ in module.named_parameters()} | {"step"} and "lm_head.weight" not in sent
    assert {tensor.dtype for name, tensor in sent.items() if name != "step"} == {torch.bfloat16}
    assert sent["step"].dtype == torch.int64 and not any(tensor.requires_grad for tensor in sent.values())


def test_buffers_keep_the_dtype_that_their_class_gives_them():
    module = random_model("deepseek_v32")
    outgoing = Outgoing.of(module.config, torch.bfloat16)
    sent = dict(outgoing.tensors(module.state_dict().items()))
    biases = {tensor.dtype for name, tensor in sent.items() if name.endswith("e_score_correction_bias")}
    folder_dtypes = {type(module)._from_config(module.config, dtype=torch.bfloat16).state_dict()[name].dtype
                     for name in sent if name.endswith("e_score_correction_bias")}  # fmt: skip
    assert biases == folder_dtypes and biases
