"""Rollout throughput: prompts sampled to given lengths, by our engine and, by turns, by others.

A repeat is one batch of random prompts of equal length, each continued by --new-tokens tokens (--lengths lognormal:
by a length drawn for each, the same for every engine) sampled at temperature 1 from the whole vocabulary, with the
log-probability of every token. With --group N each prompt is that of N sequences. Prompts differ between repeats, so
that no prefix is cached except within a group.

--against takes one or more of: hf, transformers' generate; vllm, as a separate process in its own environment, whose
Python --vllm-python names, with the same number of threads and its prefix cache on as ours; other, our own engine
with the other choice of --invariant. Every model is loaded and has run two loads before the measurement
(transformers, which has no pool of KV, a short one), so that all of its KV has been written once: a system gives
memory at the first write. An engine that is not measured is idle: vLLM's processes are stopped.

--max-isa limits all sides alike, for figures of a lesser processor from a better one: LOCKSTEP_MAX_ISA binds our
kernels, ONEDNN_MAX_CPU_ISA the matrix products of transformers and vLLM, ATEN_CPU_CAPABILITY torch's other operations.
The benchmark then runs in a process that was started with them; `limits` names them, torch_path is what torch says.

ours_tok_s and the like are new tokens over the wall seconds of the whole load, prefill included. prefill_tok_s is
prompt tokens over the seconds of the steps that ran prompt rows (decode rows in them included), step_ms the median step
that ran one decode row of every sequence. All are medians over the repeats; ratio_hf and the like are medians of each
repeat's own ratio to the run beside it, because other work on the machine changes between repeats more than within one.
spread has the lowest and the highest of each. invariant tells whether our engine's self-test passed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...rollout.engine import Engine
from .parts.budget import Budget, add_budget_argument
from .parts.load import Load, add_load_arguments, load_of, positive
from .parts.presets import DTYPES, PRESETS, load_model
from .parts.runs import Run, find_device, make_engine, num_kv_blocks, run_engine, run_transformers
from .rivals.vllm_process import VllmWorker
from .rivals.worker_process import unwinding_on_sigterm

RIVALS = ("hf", "vllm", "other")
# Level of ours: the same limit of oneDNN (transformers, vLLM) and of torch's own operations.
LIMITS = {
    "avx2": ("AVX2", "avx2"),
    "avx512": ("AVX512_CORE", "avx512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512"),
    "amx": ("AVX512_CORE_AMX", "avx512"),
}
_WARM_UP_TOKENS = 8  # for transformers, which has nothing to compile

RunOne = Callable[[Load, int], Run]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    add_load_arguments(parser)
    parser.add_argument("--against", choices=RIVALS, nargs="+", default=[], help="run the same load there too")
    parser.add_argument("--vllm-python", metavar="FILE", help="the Python of an environment that has vLLM")
    parser.add_argument("--repeats", type=positive, default=3, help="the median counts")
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--invariant", action=argparse.BooleanOptionalAction, default=True,
                        help="results do not depend on the batch")  # fmt: skip
    parser.add_argument("--max-isa", choices=tuple(LIMITS), metavar="LEVEL",
                        help=f"limit all sides alike to the instructions of {', '.join(LIMITS)} (x86)")  # fmt: skip
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True,
                        help="ours and vLLM's")  # fmt: skip
    add_budget_argument(parser)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the process must have been started with: libraries read them once."""
    if options.max_isa is None:
        return {}
    onednn, aten = LIMITS[options.max_isa]
    return {"LOCKSTEP_MAX_ISA": options.max_isa, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for an option that does not fit the machine or the model."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device = find_device(options.device)
    if "vllm" in options.against and (not options.vllm_python or device.type != "cpu"):
        raise ValueError("--against vllm needs --vllm-python, and runs on the CPU")
    budget, load = Budget(options.max_seconds), load_of(options)
    model = load_model(options.model, dtype=options.dtype, device=str(device))
    with ExitStack() as stack:
        engine, rivals = _rivals(options, load, model, stack)
        runs: dict[str, list[Run]] = {name: [] for name in rivals}
        for repeat in budget.rounds(options.repeats):
            for name, one in rivals.items():  # A B A B: other work on the machine affects both
                runs[name].append(one(load, repeat))
                rate = load.num_new_tokens(repeat) / runs[name][-1].seconds
                print(f"repeat {repeat + 1}/{options.repeats} {name}: {rate:.0f} tok/s", file=sys.stderr, flush=True)
        guarantee = engine.model.numerics.guarantee
        settings = {
            "model": options.model,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": options.dtype,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "batch": load.batch,
            "prompt_tokens": load.prompt_tokens,
            "new_tokens": load.new_tokens,
            "group": load.group,
            "lengths": load.lengths,
            "prefix_cache": options.prefix_cache,
            "repeats": len(runs["ours"]),
            "max_isa": options.max_isa,
            "limits": ", ".join(f"{name}={value}" for name, value in environment(options).items()) or "none",
            "torch_path": torch.backends.cpu.get_cpu_capability(),
            "invariant": bool(guarantee and guarantee.invariant),
        }
    return {**settings, **report(load, runs)}


def _rivals(
    options: argparse.Namespace, load: Load, model: PreTrainedModel, stack: ExitStack
) -> tuple[Engine, dict[str, RunOne]]:
    """Make our engine, and the runs that take turns, ours first, warmed up."""
    engine = make_engine(model, load, invariant=options.invariant, prefix_cache=options.prefix_cache)
    vocab_size = engine.model.vocab_size

    def ours(which: Engine) -> RunOne:
        return lambda load, repeat: run_engine(which, load, load.prompts(vocab_size, repeat), repeat)

    rivals = {"ours": ours(engine)}
    if "other" in options.against:
        rivals["other"] = ours(
            make_engine(model, load, invariant=not options.invariant, prefix_cache=options.prefix_cache)
        )
    if "hf" in options.against:
        rivals["hf"] = lambda load, repeat: run_transformers(model, load, load.prompts(vocab_size, repeat), repeat)
    if "vllm" in options.against:
        stack.enter_context(unwinding_on_sigterm())
        worker = VllmWorker(
            options.vllm_python, _folder(options.model, model, stack), load, dtype=options.dtype,
            threads=torch.get_num_threads(), kv_bytes=num_kv_blocks(load) * engine.parts.kv_plan.bytes_per_block,
            prefix_cache=options.prefix_cache,
        )  # fmt: skip
        stack.callback(worker.close)
        rivals["vllm"] = lambda load, repeat: worker.run(load, load.prompts(vocab_size, repeat), repeat)
    short = Load(load.batch, load.prompt_tokens, min(load.new_tokens, _WARM_UP_TOKENS), load.group)
    for name, one in rivals.items():
        for repeat in (-1,) if name == "hf" else (-2, -1):
            one(short if name == "hf" else load, repeat)
    return engine, rivals


def _folder(name: str, model: PreTrainedModel, stack: ExitStack) -> Path:
    """Return the model's folder on disk: a preset is written for the time of the benchmark."""
    if name not in PRESETS:
        return Path(name).resolve()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model.save_pretrained(folder)
    return folder


def report(load: Load, runs: dict[str, list[Run]]) -> dict[str, object]:
    """Compute medians over the repeats, with the lowest and highest of each under `spread`. `runs` must have "ours"."""
    ours = runs["ours"]
    rates = {
        name: [load.num_new_tokens(repeat) / run.seconds for repeat, run in enumerate(of_name)]
        for name, of_name in runs.items()
    }
    values = {f"{name}_tok_s": (of_name, 1) for name, of_name in rates.items()}
    for name in rates.keys() - {"ours"}:
        pairs = [mine / theirs for mine, theirs in zip(rates["ours"], rates[name], strict=True)]
        values[f"ratio_{name}"] = (pairs, 3)
    steps = [seconds for run in ours for seconds in run.decode_step_seconds]
    return {
        **{key: round(statistics.median(of_key), digits) for key, (of_key, digits) in sorted(values.items())},
        "prefill_tok_s": round(
            statistics.median(load.batch * load.prompt_tokens / run.prefill_seconds for run in ours), 1
        ),
        "step_ms": round(statistics.median(steps) * 1e3, 3) if steps else None,
        "spread": {
            key: [round(min(of_key), digits), round(max(of_key), digits)]
            for key, (of_key, digits) in sorted(values.items())
        },
    }
