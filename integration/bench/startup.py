"""The time from making an engine of a model folder to its first token, against transformers, in new processes.

Every measurement is a process of its own, in which imports (also that of the model's own module) are over before the
clock starts. ours_s: `Engine(folder)` and the first token of one prompt. transformers_s: `from_pretrained` and the
first token of `generate` for the same prompt. Where the folder has a tokenizer both load it, and the prompt is a text.
The three kinds of process take turns, after one of each that fills the caches: of the files' pages, of compiled
kernels, and of kept checks. unkept_s is ours with the self-test and the check of the module in every process
(LOCKSTEP_KEPT_CHECKS=0). The process_s are seconds from the start of the process, imports included.

All are medians over the repeats; ratio is the median of each repeat's own ratio of ours to transformers, spread has the
lowest and the highest. parts: ours, making the engine and its first step; transformers, loading and generating.

The default model has the shape of SmolLM2-135M (Llama, 30 layers, 134.5 M parameters, no tokenizer) and random weights.

Bar: ratio at most 1.5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive
from .parts.presets import DTYPES, save_llama
from .parts.startup_process import KINDS

_BAR = 1.5
_SHAPE = {  # of SmolLM2-135M
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
_MODULE = "lockstep.integration.bench.parts.startup_process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="default: SmolLM2-135M's shape, random weights")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="where the folder has no tokenizer")
    parser.add_argument("--repeats", type=positive, default=7, help="the median counts")
    parser.add_argument("--threads", type=positive, help="default: torch's own choice")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for a folder without a model, and where a process fails."""
    budget = Budget(options.max_seconds)
    with ExitStack() as stack:
        folder = Path(options.model) if options.model else _folder(stack, DTYPES[options.dtype])
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {str(folder)!r} holds no config.json")
        threads = options.threads or torch.get_num_threads()
        settings = {"folder": str(folder.resolve()), "dtype": options.dtype, "threads": threads,
                    "prompt_tokens": options.prompt_tokens}  # fmt: skip
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for repeat in budget.rounds(options.repeats + 1, least=2):  # the first one fills the caches
            for kind, of_kind in found.items():
                measured = one_start(kind, settings)
                if repeat:
                    of_kind.append(measured)
                name = f"repeat {repeat}/{options.repeats}" if repeat else "warm-up"
                say(f"{name} {kind}: {measured['first_token_s']:.3f} s")
    return {
        "model": options.model or "SmolLM2-135M's shape",
        "dtype": options.dtype,
        "threads": threads,
        "repeats": len(found["ours"]),
        **report(found),
    }


def one_start(kind: str, settings: dict[str, Any]) -> dict[str, float]:
    """Start one process of that kind and return its seconds. Raises ValueError with the end of its errors."""
    command = [sys.executable, "-m", _MODULE, kind, json.dumps({**settings, "started": time.monotonic()})]
    kept = {"LOCKSTEP_KEPT_CHECKS": "0" if kind == "unkept" else "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **kept}, check=False)
    if done.returncode:
        raise ValueError(f"a process of {kind} failed: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def report(found: dict[str, list[dict[str, float]]]) -> dict[str, object]:
    """Compute medians over the repeats, with the lowest and highest under `spread`."""
    values: dict[str, list[float]] = {}
    for kind, of_kind in found.items():
        values[f"{kind}_s"] = [one["first_token_s"] for one in of_kind]
        values[f"{kind}_process_s"] = [one["process_s"] for one in of_kind]
    for name, key in (("ratio", "first_token_s"), ("process_ratio", "process_s")):
        pairs = zip(found["ours"], found["transformers"], strict=True)
        values[name] = [mine[key] / theirs[key] for mine, theirs in pairs]
    medians = {name: round(statistics.median(of_name), 3) for name, of_name in values.items()}
    return {
        **medians,
        "spread": {name: [round(min(of_name), 3), round(max(of_name), 3)] for name, of_name in values.items()},
        "parts": {
            f"{kind}_{part}_s": round(statistics.median(one[f"{part}_s"] for one in found[kind]), 3)
            for kind in ("ours", "transformers")
            for part in ("load", "token")
        },
        "passed": medians["ratio"] <= _BAR,
    }


def _folder(stack: ExitStack, dtype: torch.dtype) -> Path:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    save_llama(folder, _SHAPE, dtype)
    return folder
