"""The report of `lockstep bench sync`: medians of its samples, and the verdict on each bar."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

DENSITIES = {"delta_1": 0.01, "delta_5": 0.05}
PATHS = ("distributed", "tensor", "disk", *DENSITIES)
_TRANSACTION_BAR, _IN_PLACE_BAR_MS = 1.15, 5.0
_RATE_BARS = {"distributed": ("raw_broadcast", 0.9), "tensor": ("raw_shm", 0.8), "checksum": ("raw_hashlib", 0.9)}

Sample = dict[str, float]  # of one repetition: seconds of each item, and ratios


def report(
    samples: list[Sample], peaks: dict[str, dict[str, int]], num_bytes: int, bucket_bytes: int
) -> dict[str, object]:
    """Compute the medians over the repetitions, and the bars."""

    def median(key: str) -> float:
        return statistics.median(sample[key] for sample in samples)

    def ratio(of: Callable[[Sample], float]) -> float:
        return round(statistics.median(map(of, samples)), 3)

    kinds = ("plain", "transaction")
    rates = ("raw_broadcast", "distributed", "raw_shm", "tensor", "disk", "raw_hashlib", "checksum", "verify", "memcpy")
    bars: list[dict[str, object]] = []

    def judge(name: str, value: float, bar: float, at_least: bool) -> None:
        is_met = value >= bar if at_least else value <= bar
        bars.append({"bar": name, "value": value, "limit": f"{'>=' if at_least else '<='} {bar:g}", "met": is_met})

    for name, (raw, bar) in _RATE_BARS.items():
        judge(f"{name} / {raw}", ratio(partial(_quotient, raw, name)), bar, True)
    for path in PATHS:
        judge(f"{path} transaction / (plain + hash + 2 memcpy)", ratio(partial(_transaction_ratio, path)),
              _TRANSACTION_BAR, False)  # fmt: skip
    judge("in place, ms", round(median("in_place") * 1e3, 3), _IN_PLACE_BAR_MS, False)
    for path, peak in peaks.items():
        judge(f"{path} peak extra / bucket", round(peak["total"] / bucket_bytes, 3), 2.0, False)
    return {
        **{f"{name}_gb_s": round(num_bytes / median(name) / 1e9, 3) for name in rates},
        **{f"{name}_ratio": round(median(f"{name}_ratio"), 5) for name in DENSITIES},
        "paths": {path: {f"{k}_s": round(median(key(path, k)), 4) for k in kinds} for path in PATHS},
        "in_place_ms": round(median("in_place") * 1e3, 3),
        "digest_s": round(median("digest"), 4),
        "peak_extra_bytes": peaks,
        "delta_base_bytes": num_bytes,
        "bars": bars,
        "all_met": all(bar["met"] for bar in bars),
    }


def key(path: str, kind: str) -> str:
    """Return the key in a sample for the seconds of a push; kind: plain or transaction."""
    return path if kind == "plain" else f"{path} {kind}"


def _quotient(dividend: str, divisor: str, sample: Sample) -> float:
    return sample[dividend] / sample[divisor]


def _transaction_ratio(path: str, sample: Sample) -> float:
    return sample[f"{path} transaction"] / (sample[path] + sample["raw_hashlib"] + 2 * sample["memcpy"])


def brief(sample: Sample) -> str:
    """Format a sample as one line."""
    return ", ".join(f"{name} {s:.3f} s" for name, s in sample.items() if not name.endswith("_ratio"))
