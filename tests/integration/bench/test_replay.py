"""The benchmark of replays on a small load: its arithmetic, not its speed."""

from __future__ import annotations

import json
import statistics

import torch

from lockstep.integration.cli import main as cli


def test_all_three_loads_are_proven_and_their_ratios_are_reported(capsys, restore_threads):
    small = ["--model", "tiny", "--new-tokens", "4", "--prompt-tokens", "20", "--group-prompt-tokens", "40",
             "--alone", "2", "--batches", "1", "--groups", "2", "--group", "3", "--threads", "1"]  # fmt: skip
    code = cli.main(["bench", "replay", "--json", *small])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if report["passed"] else 1) and torch.get_num_threads() == 1
    loads = {row["load"]: row for row in report["loads"]}
    assert [loads[name]["samples"] for name in ("b1", "b32", "group")] == [2, 32, 6]
    for name, row in loads.items():
        assert report[f"replay_over_generate_{name}"] == row["ratio"] > 0
        ratios = [a / b for a, b in zip(row["generate_s"], row["replay_s"], strict=True)]
        assert len(ratios) == 3 and abs(statistics.median(ratios) / row["ratio"] - 1) < 0.01
    assert 1 < report["receipt_cost"] < 2
