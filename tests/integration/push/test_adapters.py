"""Trainer adapters: every way of wrapping or sharding a model gives its whole weights under Hugging Face names.

Run as a script, this file is one rank of the jobs below: `python test_adapters.py {torch|deepspeed} FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from lockstep.integration.push.adapters.ddp import ddp_tensors
from lockstep.integration.push.adapters.deepspeed import _groups, prepare_deepspeed, zero_tensors
from lockstep.integration.push.adapters.fsdp2 import fsdp2_tensors
from lockstep.integration.push.adapters.trainer_tensors import trainer_specs, trainer_tensors
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.random_models import with_router_biases
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.manifest import specs_of

NUM_RANKS = 2
TIED_HEAD = "lm_head.weight"
ZERO_RUNS = {  # stage, bf16, elements up to which stage 3 keeps a parameter whole
    "zero 0": (0, False, 100_000),
    "zero 1": (1, False, 100_000),
    "zero 2": (2, False, 100_000),
    "zero 3": (3, False, 100_000),
    "zero 3, all partitioned": (3, False, 0),
    "zero 3 bf16": (3, True, 100_000),
}


def tiny_qwen3() -> PreTrainedModel:
    """Make a model of 0.3 million parameters whose head is tied to the embedding."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + int(os.environ.get("RANK", "0")))
    tokens = torch.randint(0, 512, (2, 24), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def digest_as(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    return model_digest([(name, tensor if dtype is None else tensor.to(dtype)) for name, tensor in tensors])


# -- in one process ---------------------------------------------------------------------------------------------------


def test_a_plain_models_tensors_are_its_own_storage_and_tied_ones_come_once():
    model = tiny_qwen3()
    tensors = dict(ddp_tensors(model))
    expected = dict(model.named_parameters())
    assert list(tensors) == list(expected) and TIED_HEAD not in tensors and TIED_HEAD in model.state_dict()
    assert all(tensors[name].data_ptr() == parameter.data_ptr() for name, parameter in expected.items())
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_wrappers_leave_no_trace_in_the_names():
    model = tiny_qwen3()
    names = [name for name, _ in ddp_tensors(model)]
    model.model.layers[1] = torch.compile(model.model.layers[1])
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    for wrapped in (model, torch.compile(model)):
        assert [name for name, _ in trainer_tensors(wrapped)] == names


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, torch.compile])
def test_wrapped_layers_keep_their_stored_buffers(wrap, make_model):
    model = make_model("lfm2_moe")
    names, specs = [name for name, _ in trainer_tensors(model)], trainer_specs(model)
    assert any(name.endswith("expert_bias") for name in names)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrap(layer)
    assert [name for name, _ in trainer_tensors(model)] == names and trainer_specs(model) == specs


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("num_steps", torch.tensor(7))
        self.register_buffer("table", torch.zeros(2), persistent=False)


class MakesBuffers(Qwen3ForCausalLM):
    """A model whose class makes buffers: one without a dtype, and one with its own."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.register_buffer("plain", torch.ones(3))
        self.register_buffer("exact", torch.ones(3, dtype=torch.float32))


def test_buffers_of_a_users_class_have_the_dtypes_with_which_it_is_loaded_and_others_are_cast(tmp_path):
    model = MakesBuffers(tiny_qwen3().config)
    model.save_pretrained(tmp_path)
    loaded = MakesBuffers.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.register_buffer("added", torch.ones(3, dtype=torch.float32))
    sent = {name: tensor.dtype for name, tensor in trainer_tensors(model, torch.bfloat16)}
    assert (sent["plain"], sent["exact"], sent["added"]) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert all(loaded.get_buffer(name).dtype == sent[name] for name in ("plain", "exact"))


def test_stored_buffers_come_with_the_parameters_and_only_floating_point_is_cast():
    model = WithBuffers()
    assert [name for name, _ in ddp_tensors(model, buffers=False)] == ["weight"]
    tensors = dict(ddp_tensors(model, torch.bfloat16))
    assert {name: t.dtype for name, t in tensors.items()} == {
        "weight": torch.bfloat16,
        "scale": torch.bfloat16,
        "num_steps": torch.int64,
    }
    assert tensors["weight"].is_contiguous() and torch.equal(tensors["weight"], model.weight.bfloat16())


CAST = ["kimi_linear", "nemotron_h", "lfm2_moe", "qwen3_next", "minimax", "zaya", "dots3_note_text"]


@pytest.mark.parametrize("family", CAST)
def test_a_cast_gives_each_tensor_the_dtype_that_an_engine_loads_it_with(family, make_model, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path / "model")
    for dtype in (torch.bfloat16, torch.float32):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype).state_dict(keep_vars=True)
        specs, tensors = trainer_specs(model, dtype), dict(trainer_tensors(model, dtype))
        assert specs == specs_of(tensors.items())
        assert {spec.name: spec.dtype for spec in specs} == {name: loaded[name].dtype for name in tensors}
    assert all(tensor.data_ptr() == dict(trainer_tensors(model))[name].data_ptr() for name, tensor in tensors.items())


@pytest.mark.parametrize("family", ["nemotron_h", "lfm2_moe"])
def test_a_folder_of_the_named_tensors_is_the_whole_model(family, make_model, tmp_path):
    """The job saves its models so. Without the routers' biases others would be loaded, of zeros."""
    model = with_router_biases(make_model(family))
    model.save_pretrained(tmp_path / "model", state_dict=dict(trainer_tensors(model)))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert model_digest(loaded.state_dict().items()) == model_digest(model.state_dict().items())


def test_models_that_no_adapter_knows_are_refused_by_name():
    with pytest.raises(ValueError, match=r"test_adapters\.WithBuffers is neither"):
        trainer_tensors(WithBuffers())
    with pytest.raises(ValueError, match=r"torch\.nn\.parallel\.data_parallel\.DataParallel is neither"):
        trainer_tensors(nn.DataParallel(tiny_qwen3()))


class Halves(torch.Tensor):
    """A quantised tensor, as torchao makes them."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0])
        raise NotImplementedError(f"Halves: {function}")  # as torchao's own message


def test_quantised_weights_are_refused_by_name():
    model, packed = tiny_qwen3(), tiny_qwen3()
    for one, kind in ((model, Halves), (packed, lambda whole: whole.to(torch.int8))):
        layer = one.model.layers[0].mlp.up_proj
        layer.weight = nn.Parameter(kind(layer.weight.detach()), requires_grad=False)
    for one, kind in ((model, "Halves"), (packed, "torch.int8")):
        with pytest.raises(ValueError, match=rf"bytes are not their numbers: .*up_proj\.weight \({kind}\)\. Engines"):
            trainer_tensors(one)


def test_groups_of_parameters_keep_to_their_budget_and_their_order():
    assert list(_groups([], 10)) == []
    assert list(_groups([4, 6, 1, 30, 2, 2], 10)) == [(0, 2), (2, 3), (3, 4), (4, 6)]


def test_deepspeed_configs_get_torchs_adam_unless_they_say_otherwise():
    pytest.importorskip("deepspeed")
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    assert prepare_deepspeed(config)["optimizer"]["params"] == {"lr": 1e-3, "torch_adam": True}
    assert config["optimizer"]["params"] == {"lr": 1e-3}
    explicit = {"optimizer": {"type": "Adam", "params": {"torch_adam": False}}}
    assert prepare_deepspeed(explicit) == explicit
    other = {"optimizer": {"type": "Lion"}}
    assert prepare_deepspeed(other) == other and prepare_deepspeed() == {}


# -- two ranks over gloo ----------------------------------------------------------------------------------------------


def torch_rank() -> dict[str, dict[str, object]]:
    """Train one step under DDP and FSDP2. Returns the tensors of the adapters and those of torch's own gathering."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    results: dict[str, dict[str, object]] = {}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for kind, policy in (("ddp", None), ("fsdp2", MixedPrecisionPolicy()), ("fsdp2 mixed", mixed)):
        model = tiny_qwen3()
        names = [name for name, _ in model.named_parameters()]
        before = model_digest(model.named_parameters())
        if policy is None:
            wrapped: nn.Module = DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy)
            wrapped = fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loss_of(wrapped).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(wrapped)  # leaves FSDP2's root parameters gathered, in the compute dtype
        adapter = ddp_tensors if policy is None else fsdp2_tensors
        tensors = {name: tensor.clone() for name, tensor in adapter(wrapped)}
        most_alive = num_alive_at_most(adapter(wrapped)) if policy else 1
        state = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
        results[kind] = {
            **report(names, before, tensors, adapter(wrapped, torch.bfloat16), trainer_tensors(wrapped)),
            "expected": model_digest((name, state[name]) for name in names) if state else None,
            "most_alive": most_alive,
        }
    return results


def deepspeed_rank(folder: Path) -> dict[str, dict[str, object]]:
    """Train two steps under each ZeRO stage. Returns the tensors of the adapter and those of DeepSpeed's own saving."""
    import deepspeed

    config = prepare_deepspeed(
        {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    )
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=60))
    results: dict[str, dict[str, object]] = {}
    for kind, (stage, is_bf16, threshold) in ZERO_RUNS.items():
        model = tiny_qwen3()
        names = [name for name, _ in model.named_parameters()]
        before = digest_as(model.named_parameters(), torch.bfloat16 if is_bf16 else None)
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        zero["stage3_param_persistence_threshold"] = threshold
        engine, *_ = deepspeed.initialize(
            model=model, config={**config, "zero_optimization": zero, "bf16": {"enabled": is_bf16}}
        )
        for step in range(2):
            engine.backward(loss_of(engine, step))
            engine.step()
            if threshold or step == 1:  # gathering between two steps changes nothing
                tensors = {name: t.clone() for name, t in zero_tensors(engine, group_bytes=200_000)}
        most_alive = num_alive_at_most(zero_tensors(engine, group_bytes=1)) if stage == 3 else 1
        results[kind] = {
            **report(names, before, tensors, zero_tensors(engine, torch.bfloat16), trainer_tensors(engine)),
            "most_alive": most_alive,
            "left_whole": [name for name, p in model.named_parameters() if stage == 3 and p.numel()],
        }
        if stage == 3:
            with pytest.raises(ValueError, match="pass the engine"):
                trainer_tensors(model)
        engine.save_16bit_model(str(folder / kind), "full.bin")
        dist.barrier()
        state = torch.load(folder / kind / "full.bin", weights_only=True)
        results[kind]["expected"] = model_digest((name, state[name]) for name in names)
        engine.destroy()
    return results


def report(
    names: list[str],
    before: str,
    tensors: Mapping[str, Tensor],
    cast: Iterable[tuple[str, Tensor]],
    by_type: Iterable[tuple[str, Tensor]],
) -> dict[str, object]:
    return {
        "names_agree": list(tensors) == names,
        "before": before,
        "digest": model_digest(tensors.items()),
        "cast": digest_as(cast),
        "expected_cast": digest_as(tensors.items(), torch.bfloat16),
        "by_type": digest_as(by_type),
    }


def num_alive_at_most(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return how many tensors an iterator keeps alive at once when its consumer keeps none."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    for _, tensor in tensors:
        alive = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensor))
        most = max(most, len(alive))
        del tensor
    return most


def launch(kind: str, folder: Path, timeout_s: float) -> list[dict[str, dict[str, object]]]:
    """Return the results of both ranks. Kills the remaining ranks when one fails or the deadline passes."""
    port = free_port()
    common = {
        **os.environ,
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)},
        **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions")},
    }
    processes = []
    try:
        for rank in range(NUM_RANKS):
            with (folder / f"log{rank}").open("wb") as log:
                command = [sys.executable, __file__, kind, str(folder)]
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(prepared_python.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(NUM_RANKS))
    assert codes == [0] * NUM_RANKS, logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def check(first: Mapping[str, dict[str, object]], second: Mapping[str, dict[str, object]]) -> None:
    for kind, result in first.items():
        assert result["names_agree"], kind
        assert result["digest"] != result["before"], kind
        assert result["digest"] == result["expected"] == result["by_type"], kind
        assert result["cast"] == result["expected_cast"], kind
        assert result["most_alive"] == 1, kind
        assert {**second[kind], "expected": result["expected"]} == result, kind


@pytest.mark.slow
def test_ddp_and_fsdp2_ranks_give_the_weights_that_torch_gathers(tmp_path):
    first, second = launch("torch", tmp_path, timeout_s=100)
    assert list(first) == ["ddp", "fsdp2", "fsdp2 mixed"]
    check(first, second)


@pytest.mark.slow
def test_zero_ranks_give_the_weights_that_deepspeed_saves_and_compile_nothing(tmp_path):
    pytest.importorskip("deepspeed")
    first, second = launch("deepspeed", tmp_path, timeout_s=200)
    assert list(first) == list(ZERO_RUNS)
    check(first, second)
    assert first["zero 1"]["digest"] == first["zero 2"]["digest"]
    assert first["zero 3"]["digest"] == first["zero 3, all partitioned"]["digest"]
    assert not any(result["left_whole"] for result in first.values())
    assert not list(tmp_path.glob("extensions/**/*.o"))


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if kind == "torch":
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = torch_rank() if kind == "torch" else deepspeed_rank(folder)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
