"""Give an engine in this process grammars by the thousand: `python -m lockstep.tests.torture.grammars --cases 5000`.

Each case is drawn from the seed and its number. It is compiled under limits and generates a few tokens in all three
modes of jumps, each alone and all three together in steps of a few rows. A case is at fault where anything is raised
but a ValueError with a reason, where `exact` and `off` differ in a bit, or a mode alone and in company, or where a
schema's finished text is no JSON. Prints the seed, the faults and the slowest cases.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from typing import Any

from lockstep.rollout.completion import Completion
from lockstep.tests.torture.patterns import KILLERS, mutated, valid

LIMITS = {"grammar_timeout_s": 2.0, "grammar_memory_mb": 512}
NUM_SLOWEST = 8


def drawn(seed: int, case: int) -> tuple[str, dict[str, Any]]:
    """Draw the constraint of one case, and its kind."""
    draw = random.Random(f"{seed}/{case}")
    kind = draw.choices(["valid", "mutated", "hostile"], [60, 37, 3])[0]
    if kind == "hostile":
        make, sizes = draw.choice(KILLERS)
        return kind, make(draw, draw.choice(sizes))
    params = valid(draw)
    if kind == "mutated":
        params = {
            name: [mutated(draw, one) for one in value] if isinstance(value, list) else mutated(draw, value)
            for name, value in params.items()
        }
    return kind, params


def bits(completion: Completion) -> tuple[Any, ...]:
    """Return the parts of an answer that must be equal."""
    return completion.token_ids, completion.logprobs, completion.forced, completion.masked_probs


class Fuzzer:
    """An engine on a small random model, and the figures of all cases so far."""

    def __init__(self, seed: int) -> None:
        from lockstep.rollout.config import EngineConfig
        from lockstep.rollout.engine import Engine
        from lockstep.tests.support.bpe_tokenizer import train_tokenizer
        from lockstep.tests.support.random_models import random_model

        self.seed, self.ends, self.faults = seed, Counter[str](), list[str]()
        self.slowest: list[tuple[float, int, str]] = []
        model = random_model("qwen3", vocab_size=1024, max_position_embeddings=512, eos_token_id=0)
        config = EngineConfig(kv_cache="128 blocks", max_num_seqs=4, max_num_batched_tokens=5, **LIMITS)  # type: ignore[arg-type]
        self.engine = Engine(model, config, tokenizer=train_tokenizer())

    def run(self, case: int) -> None:
        """Try one case, and note its end."""
        kind, params = drawn(self.seed, case)
        began = time.thread_time()
        try:
            end = self._tried(case, params)
        except Exception as error:  # noqa: BLE001 - what a case must not do
            end = f"fault: {error!r}"
            traceback.print_exc()
        if end.startswith("fault"):
            self.faults.append(f"{self.seed}/{case} ({kind} {str(params)[:300]}): {end}")
        self.ends[f"{kind} {end.partition(':')[0]}"] += 1
        self.slowest = sorted([*self.slowest, (time.thread_time() - began, case, end[:80])])[-NUM_SLOWEST:]

    def _tried(self, case: int, params: dict[str, Any]) -> str:
        from lockstep.rollout.sampling_params import SamplingParams

        found, settings = [], []
        for mode in ("off", "exact", "text"):
            common = {"max_new_tokens": 12, "sampling_seed": case, "jump_forward": mode}
            try:
                settings.append(SamplingParams(**common, **params))
                [completion] = self.engine.generate([[5, 6, 7]], settings[-1])
            except ValueError as error:
                return "refused" if str(error) else "fault: a refusal without a reason"
            found.append(completion)
            reason = completion.finish_reason
            if reason.type == "abort" and not reason.message:
                return "fault: an abort without a reason"
            if reason.type == "stop" and "json_schema" in params:
                json.loads(completion.text)
        off, exact, _ = found
        together = self.engine.generate([[5, 6, 7]] * 3, settings)
        if any(completion.finish_reason.type == "abort" for completion in found + together):
            return f"abort: {off.finish_reason.message}"  # a grammar took too long, which depends on the machine
        if bits(off) != bits(exact):
            return f"fault: exact {exact.token_ids} is not off {off.token_ids}"
        for alone, beside in zip(found, together, strict=True):
            if bits(alone) != bits(beside):
                return f"fault: {beside.token_ids} in company is not {alone.token_ids} alone"
        return f"{off.finish_reason.type}: {getattr(off.finish_reason, 'message', '')}"

    def close(self) -> None:
        self.engine.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the cases. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    fuzzer, began = Fuzzer(options.seed), time.monotonic()
    try:
        for case in range(options.first, options.first + options.cases):
            fuzzer.run(case)
    finally:
        fuzzer.close()
    print(f"{options.cases} cases in {time.monotonic() - began:.0f} s: {dict(sorted(fuzzer.ends.items()))}")
    print("slowest, in processor seconds of this process:", fuzzer.slowest[::-1])
    print(*(f"\n{fault}" for fault in fuzzer.faults), f"\n{len(fuzzer.faults)} faults")
    return 1 if fuzzer.faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
