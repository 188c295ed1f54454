"""Where the time of a decode step goes, by the file whose function spends it.

Python's own profiler measures: what a function of ours spends in its C++ kernel counts as its own time, and a builtin
of torch counts for whoever called it. The profiler makes Python dearer than it is, so that the parts with many calls
are shown somewhat too large.
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable

from ...rollout.engine import Engine
from .decode_load import decode_steps

# The first that matches a path names its part.
PARTS: tuple[tuple[str, str], ...] = (
    ("attention", r"kernels/\w*attention|hosted_attention"),
    ("sampler", r"kernels/(logprobs|native_sampling|sampling)|rollout/sampler"),
    ("norms, rotary, activation", r"kernels/(rms_norm|rotary|swiglu|activation)|fused_layers"),
    ("products", r"kernels/(linear|invariant|triton_linear)|torch/nn/modules/linear|rollout/(numerics|row_reduction)"),
    ("module code", r"/transformers/|/torch/"),
    ("scheduling", r"lockstep|rollout/"),
)
OTHER = "other Python"


def profile_decode(engine: Engine, batch: int, context: int, num_steps: int) -> dict[str, float]:
    """Share of the time of each part in `num_steps` decode steps; the parts add up to 1, the largest first."""
    profiler = cProfile.Profile()

    def around(step: Callable[[], object]) -> None:
        profiler.runcall(step)

    decode_steps(engine, batch, context, num_steps, around)
    return shares(pstats.Stats(profiler))


def shares(stats: pstats.Stats) -> dict[str, float]:
    """A builtin's own time goes to the files of its callers."""
    seconds = dict.fromkeys((*(part for part, _ in PARTS), OTHER), 0.0)
    for (path, _, _), (_, _, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if path != "~":
            seconds[part_of(path)] += own
            continue
        for (caller_path, _, _), (_, _, own_there, _) in callers.items():
            seconds[part_of(caller_path)] += own_there
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {part: round(spent / total, 4) for part, spent in ordered if spent}


def part_of(path: str) -> str:
    """The part that a source file belongs to."""
    return next((part for part, pattern in PARTS if re.search(pattern, path)), OTHER)
