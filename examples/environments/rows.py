r"""Rows for environments of other packages, and for an agent, as JSON lines.

python examples/environments/rows.py agent data/errands.jsonl
python examples/environments/rows.py textarena data/games.jsonl
python examples/environments/rows.py reasoning_gym data/tasks.jsonl --name basic_arithmetic
PYTHONPATH=examples/environments \
    python examples/environments/rows.py verifiers data/talks.jsonl --name shorter_each_time
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(package: str, name: str, num: int) -> Iterator[dict[str, Any]]:
    """Yield rows for the environment of a package."""
    if package == "agent":
        yield from ({"prompt": f"Count from {first} to {first + 5}."} for first in range(num))
    elif package == "textarena":
        yield from ({"prompt": f"game {seed}", "seed": seed} | ({"env": name} if name else {}) for seed in range(num))
    elif package == "reasoning_gym":
        import reasoning_gym

        for entry in reasoning_gym.create_dataset(name or "basic_arithmetic", size=num, seed=0):
            yield {"prompt": entry["question"], **entry}
    else:
        import verifiers

        yield from verifiers.load_environment(name).get_dataset(n=num).to_list()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=("agent", "textarena", "reasoning_gym", "verifiers"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", default="", help="of the game, the dataset or the environment")
    parser.add_argument("--num", type=int, default=200, help="number of rows; of verifiers at most as many")
    options = parser.parse_args()
    if options.package == "verifiers" and not options.name:
        parser.error("--name is needed: the environment of verifiers")
    options.file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows(options.package, options.name, options.num)]
    options.file.write_text("".join(lines), encoding="utf-8")
    print(f"{options.file}: {len(lines)} rows")
