"""Samples of a run are proven by `lockstep replay RUN`, with the weights that the run has kept."""

from __future__ import annotations

import json

import pytest

from lockstep.integration.cli import main as cli
from lockstep.integration.grpo.main import main
from lockstep.integration.grpo.results.samples import read_samples
from lockstep.integration.grpo.results.weights_kept import read_run_engine
from lockstep.integration.replay.digest_index import read_index
from lockstep.integration.replay.folders import weight_folders
from lockstep.tests.integration.grpo.test_job import CONFIG, SHRUNK


@pytest.mark.slow
def test_steps_of_a_run_are_proven_with_the_weights_that_it_has_kept(tmp_path, monkeypatch, capsys, restore_threads):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text_reward.py").write_text(
        "def by_text(prompt, completion, answer):\n    return len(completion) % 7 / 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main([str(CONFIG), *SHRUNK, "run.num_steps=4"]) in (0, None)
    run = tmp_path / "runs" / "arithmetic"
    engine = read_run_engine(run)
    assert engine["guarantee"]["invariant"] and (tmp_path / engine["model"] / "config.json").is_file()
    index = {entry.version: entry for entry in read_index(run)}
    assert set(index) == {"0", "2", "4"} and index["2"].folder == "checkpoints/step-000002"
    assert len(weight_folders(run)) == 3
    rows = read_samples(run, 3)
    assert all(len(row["receipts"]) == 1 and row["receipts"][0]["spans"][0]["version"] == "2" for row in rows)
    capsys.readouterr()
    for step in (1, 3):
        assert cli.main(["replay", str(run), "--step", str(step), "--json", "--quiet"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["equal"], report["samples"], report["chain"]) == (16, 16, [])
    assert cli.main(["replay", str(run), "--quiet"]) == 0  # not step 4, which was drawn from version 3
    printed = capsys.readouterr()
    assert "step 3, the newest whose weights it has" in printed.err and "16 of 16 samples proven" in printed.out
    assert cli.main(["replay", str(run), "--weights", engine["model"], "--quiet"]) == 3  # whose index names no step
    assert "step 4\n" in capsys.readouterr().err
    checkpoint = run / "checkpoints" / "step-000002"  # without a configuration of its own
    assert cli.main(["explain", str(run), "--step", "3", "--model", str(checkpoint)]) == 0
    assert "log-probabilities are the first way's, bit for bit" in capsys.readouterr().out
    assert cli.main(["replay", str(run), "--step", "2", "--quiet"]) == 3
    assert "(version 1) are at hand; those of versions 0, 2, 4 are" in capsys.readouterr().out
