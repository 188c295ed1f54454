"""Time saved by jump-forward where a JSON schema forces most of the text, and the cost of masks for other sequences.

The load is --batch sequences of one schema, at temperature 1, on random weights and a byte-level BPE as large as the
model's vocabulary; every mode gets the same seeds, so that off and exact produce the same tokens, which is checked.
forwards are sequence-forwards: the sum of sequences over all steps. No step has drafts. The slowdown compares decode
steps of a batch without grammars with those of the same batch, half of it with one, jumps off. Variants take turns
within each repeat, after one round that is not counted; a figure is the median over repeats. Bars: forwards saved =
tokens forced, less at most one per span; 1.6 times the throughput where half the tokens are forced; a slowdown of at
most 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...rollout.completion import Completion
from ...rollout.config import EngineConfig
from ...rollout.engine import Engine
from ...rollout.grammars.compiler import Constraint
from ...rollout.sampling_params import SamplingParams
from .parts.budget import Budget, add_budget_argument, say
from .parts.load import positive
from .parts.presets import load_model
from .parts.vocabularies import byte_level_bpe

MODES = ("off", "text", "exact")
_PROMPT = "Describe the order as JSON: "
_NUM_SKIPPED = 4  # the first steps, which prefill

ORDER = {
    "type": "object",
    "properties": {
        "order_identifier": {"type": "integer", "minimum": 1, "maximum": 99999},
        "customer_information": {
            "type": "object",
            "properties": {
                "customer_type": {"enum": ["private_customer", "business_customer", "public_institution"]},
                "country_of_residence": {"enum": ["Germany", "Georgia", "Netherlands", "New Zealand"]},
                "newsletter_subscription": {"type": "boolean"},
            },
            "required": ["customer_type", "country_of_residence", "newsletter_subscription"],
        },
        "ordered_articles": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "article_number": {"type": "string", "maxLength": 6},
                    "quantity_ordered": {"type": "integer", "minimum": 1, "maximum": 99},
                    "availability_status": {"enum": ["in_stock", "out_of_stock", "discontinued"]},
                },
                "required": ["article_number", "quantity_ordered", "availability_status"],
            },
        },
        "preferred_delivery_method": {"enum": ["standard_shipping", "express_shipping", "collection_in_store"]},
    },
    "required": ["order_identifier", "customer_information", "ordered_articles", "preferred_delivery_method"],
}
ENDLESS = {"type": "array", "items": ORDER, "minItems": 1000}  # constrains during the whole measurement


@dataclass(frozen=True)
class GrammarRun:
    """One run of the load."""

    answers: list[Completion]
    seconds: float
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help="a preset, or a folder")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--free-tokens", type=positive, default=60, help="tokens a sequence, for the slowdown")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=2)
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report."""
    torch.set_num_threads(options.threads)
    budget = Budget(options.max_seconds)
    model = load_model(options.model)
    # Without drafts: a repeat would draw from the history of the one before, which has the same tokens.
    config = EngineConfig(kv_cache="1024 blocks", prefix_cache=False, speculation="off")
    engine = Engine(model, config, tokenizer=byte_level_bpe(model.config.vocab_size))
    compile_ms = _compile_ms(engine)
    loads: dict[str, list[GrammarRun]] = {mode: [] for mode in MODES}
    steps: dict[str, list[float]] = {"free": [], "half": []}
    for repeat in budget.rounds(options.repeats + 1, least=2):  # the first one warms up
        for mode in MODES:
            load = _run_load(engine, mode, options.batch)
            loads[mode] += [load] if repeat else []
            say(f"repeat {repeat}/{options.repeats} {mode}: {load.num_tokens / load.seconds:.0f} tok/s")
        for name, num_constrained in (("free", 0), ("half", options.batch // 2)):
            seconds = _decode_steps(engine, options.batch, num_constrained, options.free_tokens)
            steps[name] += seconds if repeat else []
    engine.close()
    return {"model": options.model, "batch": options.batch, "compile_ms": compile_ms, **_report(loads, steps)}


def _report(loads: dict[str, list[GrammarRun]], steps: dict[str, list[float]]) -> dict[str, object]:
    off, text, exact = (loads[mode][-1] for mode in MODES)
    same = [a.token_ids == b.token_ids for a, b in zip(off.answers, exact.answers, strict=True)]
    assert all(same), "off and exact produced different tokens"
    tok_s = {mode: load.num_tokens / statistics.median(x.seconds for x in loads[mode])
             for mode, load in zip(MODES, (off, text, exact), strict=True)}  # fmt: skip
    forwards = {mode: loads[mode][-1].metrics["num_sequence_forwards"] for mode in MODES}
    num_forced = exact.metrics["num_jump_forward_tokens"]
    return {
        **{f"{mode}_tok_s": round(tok_s[mode], 1) for mode in MODES},
        "exact_speedup": round(tok_s["exact"] / tok_s["off"], 3),
        "text_speedup": round(tok_s["text"] / tok_s["off"], 3),
        **{f"{mode}_seconds": round(statistics.median(x.seconds for x in loads[mode]), 3) for mode in MODES},
        **{f"{mode}_forwards": int(forwards[mode]) for mode in MODES},
        "num_tokens": exact.num_tokens,
        "tokens_forced": int(num_forced),
        "forced_fraction": round(num_forced / exact.num_tokens, 3),
        "forwards_saved": int(forwards["off"] - forwards["exact"]),
        "num_spans": int(exact.metrics["num_jumps"]),
        "grammar_us_per_token": round(off.metrics["grammar_seconds"] / off.num_tokens * 1e6, 1),
        "jump_us_per_token": round(exact.metrics["jump_forward_seconds"] / exact.num_tokens * 1e6, 1),
        "free_step_ms": round(statistics.median(steps["free"]) * 1e3, 3),
        "half_step_ms": round(statistics.median(steps["half"]) * 1e3, 3),
        "free_slowdown": round(statistics.median(steps["half"]) / statistics.median(steps["free"]) - 1, 4),
    }


def _run_load(engine: Engine, mode: str, batch: int) -> GrammarRun:
    params = [
        SamplingParams(json_schema=json.dumps(ORDER), jump_forward=mode, max_new_tokens=400, sampling_seed=index)
        for index in range(batch)
    ]
    before = _metrics(engine)
    started = time.perf_counter()
    answers = engine.generate([_PROMPT] * batch, params)
    seconds = time.perf_counter() - started
    after = _metrics(engine)
    return GrammarRun(answers, seconds, {name: after[name] - before[name] for name in after})


def _metrics(engine: Engine) -> dict[str, float]:
    state: dict[str, Any] = engine.state()
    return dict(state["metrics"])


def _decode_steps(engine: Engine, batch: int, num_constrained: int, num_new: int) -> list[float]:
    """Measure the seconds of each decode step of a batch; its first `num_constrained` sequences have a grammar."""
    for index in range(batch):
        schema = json.dumps(ENDLESS) if index < num_constrained else None
        engine.add(_PROMPT, SamplingParams(json_schema=schema, jump_forward="off" if schema else None,
                                           max_new_tokens=num_new, sampling_seed=index, ignore_eos=True))  # fmt: skip
    seconds = []
    with engine.model.rollout_phase():
        while engine.has_work:
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
    return seconds[_NUM_SKIPPED:-1]


def _compile_ms(engine: Engine) -> float:
    """Measure the compile time of the schema, with the vocabulary ready."""
    grammars = engine.parts.grammars
    grammars.compiled([SamplingParams(regex="a")])
    before = grammars.cache.compile_seconds
    grammars.cache.get_all([Constraint("json_schema", json.dumps(ORDER, ensure_ascii=False))])
    return round((grammars.cache.compile_seconds - before) * 1e3, 2)
