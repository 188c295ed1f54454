"""Small random models of the families that Lockstep promises to host, and the engines around them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

# family -> (config class, what its config has beyond the common part)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),  # has bias on q, k and v
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma2": ("Gemma2Config", {"sliding_window": 20, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 20, "query_pre_attn_scalar": 32}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
}

MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture
def make_model() -> MakeModel:
    """make_model("gemma2", dtype=torch.bfloat16): a random model whose logits are far from uniform."""

    def make(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> PreTrainedModel:
        config_name, extra = FAMILIES[family]
        config = getattr(transformers, config_name)(**{**_COMMON, **extra, **overrides})
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
                elif "sinks" in name or "bias" in name:
                    parameter.normal_(0.0, 0.5)
        return model.eval()

    return make


@pytest.fixture
def restore_threads():
    """Put torch's thread count back after a test that changes it."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def until() -> Callable[..., None]:
    """until(condition): return once `condition()` is true, looking again and again; fails after `timeout_s`.

    For what nobody announces; wait for an event or an answer where there is one.
    """

    def wait(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "") -> None:
        end, pause = time.monotonic() + timeout_s, threading.Event()
        while not condition():
            assert time.monotonic() < end, f"it never came about in {timeout_s:g} s: {what or condition}"
            pause.wait(0.005)

    return wait


@pytest.fixture
def run_world() -> Callable[..., list[object]]:
    """run_world(4, rank_function): what rank_function(rank) returned on each rank of a torch.distributed job (gloo).

    Each rank is a forked process with one thread and a default group. Fails with the rank and the traceback where one
    raised, died, or was not done in `timeout_s`. What is returned must pickle; tensors are copied through a file.
    """

    def run(num_ranks: int, rank_function: Callable[[int], object], timeout_s: float = 120.0) -> list[object]:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                context.Process(target=_run_rank, args=(rank_function, rank, num_ranks, folder, timeout_s), daemon=True)
                for rank in range(num_ranks)
            ]
            for process in processes:
                process.start()
            try:
                return _results_of(processes, folder, timeout_s)
            finally:
                for process in processes:
                    process.kill()
                    process.join()

    return run


def _run_rank(
    rank_function: Callable[[int], object], rank: int, num_ranks: int, folder: str, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    init, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.save(rank_function(rank), f"{folder}/result.{rank}")
    dist.barrier()  # nobody leaves while another still talks to it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _results_of(processes: list[multiprocessing.Process], folder: str, timeout_s: float) -> list[object]:
    running, end = {process.sentinel for process in processes}, time.monotonic() + timeout_s
    while running:
        ended = multiprocessing.connection.wait(running, max(0.0, end - time.monotonic()))
        running -= set(ended)
        codes = [process.exitcode for process in processes]
        if not ended or any(codes):
            pytest.fail(f"a rank failed, or was not done in {timeout_s:g} s; exit codes by rank: {codes}")
    return [torch.load(f"{folder}/result.{rank}", weights_only=False) for rank in range(len(processes))]
