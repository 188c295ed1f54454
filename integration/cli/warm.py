"""`lockstep warm`: compile and record all that an engine of a model will use, so that no request waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from .arguments.parser import CommandParser
from .arguments.settings import build, read_settings


def run(arguments: Sequence[str]) -> int:
    """Warm the caches of this machine for a model. Returns the exit code."""
    parser = CommandParser(
        prog="lockstep warm",
        description="Compile the kernels that an engine of this model uses, into the caches that later processes read "
        "(TRITON_CACHE_DIR on a GPU, LOCKSTEP_CACHE_DIR for C++), and record every decode size once. Run it once on "
        "each node, or once with the caches on a shared disk, before a cluster's processes start.",
    )
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--engine", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
                        help="engine settings, as for `lockstep serve`")  # fmt: skip
    options = parser.parse_args(arguments)
    from ...rollout.config import EngineConfig
    from ...rollout.engine import Engine
    from ...rollout.sampling_params import SamplingParams
    from ..warming import record_sizes, say_progress

    started = time.perf_counter()
    engine = Engine(options.model, build(EngineConfig, read_settings("--engine", options.engine)))
    try:
        num_recorded = record_sizes(engine, say_progress)
        longest = min(engine.config.max_num_batched_tokens, engine.parts.max_model_len - 2)
        for length in (1, min(40, longest), longest):  # chunks of few rows and of many, and both draws
            plain = SamplingParams(max_new_tokens=2, ignore_eos=True)
            engine.generate([[0] * length] * 2, [plain, replace(plain, top_p=0.9, top_k=20)])
        guarantee = engine.model.numerics.describe()
    finally:
        engine.close()
    print(f"warm in {time.perf_counter() - started:.1f} s: {num_recorded} decode sizes recorded; {guarantee}")
    return 0
