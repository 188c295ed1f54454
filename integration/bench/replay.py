"""Samples proven per second over samples generated per second, and the cost of receipts.

Three loads of random prompts, each sampled at temperature 1 to --new-tokens tokens with a receipt, and then proven by
one `service.replay` of all its receipts together, which reads the weights' digest anew. `b1`: prompts of
--prompt-tokens, generated one at a time. `b32`: the same, 32 at a time. `group`: groups of --group samples of a prompt
of --group-prompt-tokens, generated a group at a time, as b1 is one at a time; a replay reads a prompt once a group.
Every ratio is of one generation and the replay beside it; with --repeats the median counts. The replay must find all
samples equal, or there is no report.

receipt_cost is 1 + the processor seconds that making receipts took, over those of the rollout with them (b32's). Bars:
8, 1.2 and 1.5, on a processor with AMX 8, 2 and 2; 1.02.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ...kernels.machine.native import compile_flags
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.request_options import RequestOptions
from ...rollout.sampling_params import SamplingParams
from ..service import RolloutService
from .parts.budget import Budget, add_budget_argument
from .parts.load import positive
from .parts.presets import DTYPES, load_model

_BARS = {True: (8.0, 2.0, 2.0), False: (8.0, 1.2, 1.5)}  # b1, b32 and group: with AMX, without
_RECEIPT_COST = 1.02
_BATCH = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help="a preset or a model folder")
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="of b1 and b32")
    parser.add_argument("--group-prompt-tokens", type=positive, default=512)
    parser.add_argument("--new-tokens", type=positive, default=128)
    parser.add_argument("--group", type=positive, default=8, help="samples of each prompt of `group`")
    parser.add_argument("--alone", type=positive, default=16, help="samples of b1")
    parser.add_argument("--batches", type=positive, default=2, help="of b32, with 32 samples each")
    parser.add_argument("--groups", type=positive, default=6, help="prompts of `group`")
    parser.add_argument("--repeats", type=positive, default=3, help="the median counts")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises AssertionError where a sample was not proven."""
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    model = load_model(options.model, dtype=options.dtype)
    service = _service(model, options)
    loads = {
        "b1": _Load(service, options.alone, 1, 1, options.prompt_tokens, options.new_tokens),
        "b32": _Load(service, _BATCH * options.batches, _BATCH, 1, options.prompt_tokens, options.new_tokens),
        "group": _Load(service, options.groups, 1, options.group, options.group_prompt_tokens, options.new_tokens),
    }
    with service.rollout():
        for load in loads.values():
            load.warm_up()
        for repeat in budget.rounds(options.repeats):
            for name, load in loads.items():
                print(f"{name}: {load.run(repeat)}", file=sys.stderr, flush=True)
    has_amx = torch.cpu._is_amx_tile_supported() and "-mno-amx-bf16" not in compile_flags(os.environ)
    ratios = {name: statistics.median(load.ratios) for name, load in loads.items()}
    cost = 1 + loads["b32"].receipt_seconds / loads["b32"].cpu_seconds
    return {
        "model": options.model,
        "threads": options.threads,
        "has_amx": has_amx,
        **{f"replay_over_generate_{name}": round(ratio, 3) for name, ratio in ratios.items()},
        "receipt_cost": round(cost, 5),
        "loads": [load.row(name) for name, load in loads.items()],
        "passed": cost <= _RECEIPT_COST
        and all(ratio >= bar for ratio, bar in zip(ratios.values(), _BARS[has_amx], strict=True)),
    }


def _service(model: PreTrainedModel, options: argparse.Namespace) -> RolloutService:
    longest = max(options.prompt_tokens, options.group_prompt_tokens) + options.new_tokens
    num_blocks = max(_BATCH, options.group) * -(-(longest + 16) // EngineConfig.block_size)
    config = EngineConfig(kv_cache=num_blocks, max_num_seqs=max(_BATCH, options.group))
    service = RolloutService(Engine(model, config))
    service.commit_in_place("1", source=model.named_parameters())
    return service


@dataclass
class _Load:
    """Prompts that are generated some at a time, and proven together."""

    service: RolloutService
    num_prompts: int
    num_at_a_time: int  # prompts
    num_samples: int  # of each prompt
    num_prompt_tokens: int
    num_new_tokens: int
    generate_seconds: list[float] = field(default_factory=list)  # of each repeat
    replay_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0  # of generation
    receipt_seconds: float = 0.0

    @property
    def ratios(self) -> list[float]:
        """How many samples were proven in the time of one that was generated, of each repeat."""
        return [a / b for a, b in zip(self.generate_seconds, self.replay_seconds, strict=True)]

    def warm_up(self) -> None:
        """Generate and prove a few samples."""
        receipts = self._generate(self._prompts(-1)[: self.num_at_a_time], -1)
        assert self.service.replay(receipts).num("equal") == len(receipts)

    def run(self, repeat: int) -> str:
        """Measure once; returns a line for people."""
        prompts, metrics = self._prompts(repeat), self.service.engine.metrics
        cpu, spent, started = time.process_time(), metrics.receipt_seconds, time.perf_counter()
        receipts = [
            receipt
            for at in range(0, len(prompts), self.num_at_a_time)
            for receipt in self._generate(prompts[at : at + self.num_at_a_time], repeat)
        ]
        generated = time.perf_counter()
        self.cpu_seconds += time.process_time() - cpu
        self.receipt_seconds += metrics.receipt_seconds - spent
        report = self.service.replay(receipts)
        self.replay_seconds.append(time.perf_counter() - generated)
        self.generate_seconds.append(generated - started)
        assert report.num("equal") == len(receipts), list(report.lines())
        return f"{len(receipts)} samples, generated in {self.generate_seconds[-1]:.2f} s, proven in " \
               f"{self.replay_seconds[-1]:.2f} s, {self.ratios[-1]:.2f} times as fast"  # fmt: skip

    def row(self, name: str) -> dict[str, object]:
        """Return the load as a line of a table, with the seconds of each repeat."""
        return {
            "load": name, "samples": self.num_prompts * self.num_samples, "prompt_tokens": self.num_prompt_tokens,
            "new_tokens": self.num_new_tokens, "generate_s": [round(seconds, 6) for seconds in self.generate_seconds],
            "replay_s": [round(seconds, 6) for seconds in self.replay_seconds],
            "ratio": round(statistics.median(self.ratios), 3),
        }  # fmt: skip

    def _prompts(self, repeat: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(repeat + 2)
        vocab_size = self.service.engine.model.vocab_size
        return torch.randint(vocab_size, (self.num_prompts, self.num_prompt_tokens), generator=generator).tolist()

    def _generate(self, prompts: Sequence[list[int]], repeat: int) -> list[dict[str, object]]:
        params = SamplingParams(
            max_new_tokens=self.num_new_tokens, n=self.num_samples, sampling_seed=repeat, ignore_eos=True
        )
        options = RequestOptions(return_receipt=True)
        answers = self.service.engine.generate(list(prompts), params, options=options)
        return [answer.receipt for answer in answers if answer.receipt is not None]
