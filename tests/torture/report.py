"""The report of a storm: a summary for people, and the figures as one JSON object."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.tests.torture.storm import GROWTH, Limits, Measures, Storm

SHOWN = 12  # violations in the summary; the JSON object has more


def report(
    storm: Storm, measures: Measures, limits: Limits, options: argparse.Namespace, checked: dict[str, int],
    record: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Print the summary and return the figures."""
    verdict, statuses = storm.scene.verdict, storm.scene.record.statuses
    start_mib = measures.start.get("rss", 0) >> 20
    result: dict[str, Any] = {
        "passed": not verdict.counts,
        "seed": options.seed,
        "minutes": options.minutes,
        "attackers": storm.num_steps,
        "violations": dict(verdict.counts),
        "answers": checked,
        "longest_s": measures.longest_s,
        "memory_mib": {"start": start_mib, "most": measures.most.get("rss", 0) >> 20,
                       "most of its helpers": measures.most.get("helpers", 0) >> 20,
                       "limit": int(GROWTH * start_mib) + (limits.allowance >> 20)},
        "descriptors": [each.get("descriptors") for each in (measures.start, measures.most, measures.end)],
        "threads": [each.get("threads") for each in (measures.start, measures.most, measures.end)],
        "statuses": dict(sorted(statuses.items())),
        "listed": [asdict(one) for one in verdict.listed],
        "record": str(record) if record else None,
    }  # fmt: skip
    print(f"\n{'attacker':<16}{'steps':>7}  answers by status")
    for name, steps in storm.num_steps.items():
        mine = {key.split()[1]: n for key, n in statuses.items() if key.split()[0] == name}
        print(f"{name:<16}{steps:>7}  {' '.join(f'{status}: {n}' for status, n in sorted(mine.items()))}")
    print("checked: ", ", ".join(f"{n} {what}" for what, n in checked.items()))
    print("longest: ", ", ".join(f"{path} {seconds:.2f} s" for path, seconds in measures.longest_s.items()))
    print("memory:  ", " ".join(f"{what} {mib} MiB" for what, mib in result["memory_mib"].items()))
    print("descriptors and threads, at the start, at most, at the end:", result["descriptors"], result["threads"])
    for one in verdict.listed[:SHOWN]:
        print(f"\n{one.kind} after {one.at_s} s: {one.what[:600]}")
        for place in one.under_way[:8]:
            print(f"    under way: {place[:200]}")
    if verdict.counts:
        print(f"\nbroken: {dict(verdict.counts)}; repeat with --seed {options.seed}, single steps with --replay. "
              f"The last requests: {record}")  # fmt: skip
    else:
        print("\nheld")
    return result
