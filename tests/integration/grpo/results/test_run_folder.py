"""A run's folder has one owner, who is named; leftovers go; a full disk is one line with the path and the next step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.integration.failures import FileFailed, files_of
from lockstep.integration.grpo.backends.backend import GatheredState, Gathering
from lockstep.integration.grpo.environments.session import NoRoom
from lockstep.integration.grpo.main import main
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.results.best_model import BestModel
from lockstep.integration.grpo.results.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
    refuse_other_draws,
    save_checkpoint,
    saved_digest,
)
from lockstep.integration.grpo.results.run_folder import SOCKETS, owned_folder
from lockstep.integration.grpo.results.run_log import RunLog, read_metrics
from lockstep.integration.grpo.results.settings_kept import changed_settings, describe, other_seed, settings_of
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sections import DataSettings, RunSettings
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.ranks import Ranks
from lockstep.tests.support.full_disks import no_file_above, small_disk
from lockstep.weight_sync.disk.claims import SUFFIX

CONFIG = Path(__file__).parents[4] / "configs" / "arithmetic_cpu.toml"
OWNER = """
import os, sys
from pathlib import Path
from lockstep.integration.grpo.results.run_folder import owned_folder

with owned_folder(Path(sys.argv[1]), resume=True):
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
LINE = {"step": 1, "reward_mean": 0.5, "logprob_gap": 0.0, "rollout_tokens_per_s": 1.0, "rollout_s": 1.0,
        "train_s": 1.0, "sync_s": 1.0, "weight_version": "1", "weight_digest": "d"}  # fmt: skip


def state(num_values: int = 10) -> GatheredState:
    parts = {"w": torch.zeros(num_values)}, {"m/w": torch.ones(num_values)}
    ranks = Ranks(0, 1, torch.device("cpu"))
    return GatheredState(*(Gathering(list(part), partial(iter, part.items()), ranks) for part in parts))


def test_a_second_job_is_refused_by_the_owners_name_until_the_owner_is_dead(tmp_path, capsys):
    folder, arguments = tmp_path / "arithmetic", [str(CONFIG), f"run.dir={tmp_path}"]
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        (folder / "metrics.jsonl").write_text("")
        for resume in ([], ["--resume"]):
            assert main([*arguments, *resume]) == 2
            err = capsys.readouterr().err
            named = rf"lockstep: error: {folder} is used by process {pid} on host \S+ since 20\S+ \S+ \S+\n"
            assert re.fullmatch(named, err)
        assert (folder / "metrics.jsonl").exists(), "nothing was moved"
        owner.kill()
        owner.wait()
        with owned_folder(folder, resume=True):
            assert json.loads((tmp_path / ".arithmetic.lock").read_text())["pid"] == os.getpid()
            assert main([*arguments, "--resume"]) == 2
    with owned_folder(folder, resume=False):
        assert (tmp_path / "arithmetic.1" / "metrics.jsonl").exists() and list(folder.iterdir()) == []


def test_a_run_is_not_resumed_for_fewer_steps_than_it_has_done(tmp_path):
    settings = JobConfig(RunSettings("r", str(tmp_path), num_steps=2))
    check_job(settings, 1, resume=True)
    for step in (2, 3):
        check_job(settings, 1, resume=True)  # as many steps: only the results are written again
        save_checkpoint(settings.folder / "checkpoints", step, state())
    with pytest.raises(ValueError, match=r"run\.num_steps=2, but the newest checkpoint in .* is of step 3: raise"):
        check_job(settings, 1, resume=True)
    check_job(settings, 1)  # a run from the start


def test_a_run_is_not_resumed_with_the_seed_of_another_and_names_the_settings_that_have_changed(tmp_path):
    begun = JobConfig(RunSettings("r", str(tmp_path), seed=3), data=DataSettings(reasoning_gym="chain_sum"))
    path = save_checkpoint(begun.folder / "checkpoints", 2, state(), settings=settings_of(begun))
    check_job(replace(begun, data=DataSettings(), run=replace(begun.run, num_steps=9)), 1, resume=True)
    with pytest.raises(ValueError, match=r"run\.seed=4, but .*step-000002 is of a run with run\.seed=3: .*Resume it"):
        check_job(replace(begun, data=DataSettings(), run=replace(begun.run, seed=4)), 1, resume=True)
    now = replace(begun, reward=["a:b"], run=replace(begun.run, timeout_s=5), train=TrainSettings(learning_rate=0.5))
    said = describe(changed_settings(now, path))
    assert said == "reward was 'exact_answer' and is ['a:b'], train.learning_rate was 5e-05 and is 0.5"
    lines = TrainSettings(schedule="linear")
    longer = replace(begun, train=lines, run=replace(begun.run, num_steps=9))  # its learning rates fall otherwise
    assert list(changed_settings(longer, path)) == ["run.num_steps", "train.schedule"]
    of_before = save_checkpoint(begun.folder / "checkpoints", 3, state())  # by a version that kept no settings
    assert changed_settings(now, of_before) == {}
    (of_before / "state.json").write_text("no JSON")
    assert other_seed(now) == []  # the load of the checkpoint says it


def test_the_leftovers_of_killed_runs_go_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder, sockets = tmp_path / "run", tmp_path / "tmp" / f"{SOCKETS}1"
    save_checkpoint(folder / "checkpoints", 1, state())
    unfinished = [folder / "checkpoints" / name for name in (".partial-1", ".step-000002.partial-77-ab",
                                                             ".step-000000.removed")]  # fmt: skip
    unfinished += [folder / "gap" / name for name in (".model.partial-ab", ".model.removed")]
    claimed = [folder / ".model.partial-ab", folder / "weights" / "update-ab", sockets]
    for part in (*unfinished, *claimed):
        part.mkdir(parents=True)
        (part / "half").write_text("x")
    for part in claimed:
        part.with_name(part.name + SUFFIX).write_text("")
    with owned_folder(folder, resume=True):
        assert not [part for part in (*unfinished, folder / ".model.partial-ab", sockets) if part.exists()]
        assert newest_checkpoint(folder / "checkpoints").name == "step-000001"
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "gap", "weights"]
    from lockstep.weight_sync.transports.disk import DiskTransport

    DiskTransport(folder / "weights")
    assert list((folder / "weights").iterdir()) == []


def test_the_best_model_of_a_run_that_was_killed_as_it_was_replaced_is_still_the_best(tmp_path):
    folder = tmp_path / "run"
    best = BestModel(folder)
    for name in (".best.removed", ".model.removed", "model"):  # killed before the second rename, and after it
        (folder / name).mkdir(parents=True)
    for file, text in best.described(2, {"eval_reward_mean": 0.5}, "digest").items():
        (folder / ".best.removed" / file).write_text(text)
    with owned_folder(folder, resume=True):
        assert sorted(path.name for path in folder.iterdir()) == ["best", "model"]
        assert not best.is_beaten_by(0.5) and best.is_beaten_by(0.75)


def test_a_checkpoint_that_does_not_fit_leaves_nothing_and_the_older_ones_stand(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        for step in (1, 2):
            save_checkpoint(disk, step, state())
        with pytest.raises(FileFailed) as failed:
            save_checkpoint(disk, 3, state(200_000))
        assert str(failed.value) == (
            f"{disk / 'step-000003'} cannot be written: No space left on device; make room there, then start the same "
            "job with --resume, which continues from the newest checkpoint"
        )
        assert sorted(path.name for path in disk.iterdir()) == ["step-000001", "step-000002"]
        save_checkpoint(disk, 3, state())
        assert sorted(path.name for path in disk.iterdir()) == ["step-000002", "step-000003"]


def test_a_checkpoint_that_cannot_be_written_or_read_is_named(tmp_path):
    with pytest.raises(FileFailed, match=r"step-000001 cannot be written: File too large; make room"):  # noqa: SIM117
        with no_file_above(1000):
            save_checkpoint(tmp_path, 1, state(10_000))
    assert list(tmp_path.iterdir()) == []
    path = save_checkpoint(tmp_path, 1, state())
    (path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(FileFailed, match=r"step-000001/model\.safetensors cannot be read: .*; remove this folder"):
        load_checkpoint(path)
    whole = (path / "state.json").read_text()
    for damaged in ("", whole[: len(whole) // 2], "x" * 40):
        (path / "state.json").write_text(damaged)
        for read in (saved_digest, refuse_other_draws):
            with pytest.raises(FileFailed, match=r"step-000001/state\.json cannot be read: it is damaged .*; remove"):
                read(path)


def test_metrics_that_cannot_be_written_are_an_error_and_views_of_them_are_not(tmp_path, monkeypatch, caplog):
    pytest.importorskip("matplotlib")
    log = RunLog(tmp_path, 4, 0, tensorboard=False)
    log.step(LINE)
    (tmp_path / "progress.png").mkdir()
    log.close()
    assert "progress.png is not up to date" in caplog.text
    log = RunLog(tmp_path, 4, 1, tensorboard=False)
    with pytest.raises(FileFailed, match=r"metrics\.jsonl cannot be written: File too large"), no_file_above(250):
        log.step(LINE | {"step": 2})
    log.close(draws=False)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    with pytest.raises(FileFailed, match=r"metrics\.jsonl cannot be written"), no_file_above(50):
        RunLog(tmp_path, 4, 1, tensorboard=False)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert not (tmp_path / "metrics.partial").exists()


def test_the_bar_of_a_log_on_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails too
    monkeypatch.setattr("sys.stderr", full)
    log = RunLog(tmp_path, 4, 0, tensorboard=False)
    log.step(LINE)
    log.close(draws=False)
    monkeypatch.undo()
    with suppress(OSError):
        full.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_failed_job_ends_in_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys):
    def fail(*arguments: object, **options: object) -> None:
        with files_of(tmp_path / "file"), open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    monkeypatch.setattr("lockstep.integration.grpo.main.run", fail)
    assert main([str(CONFIG), f"run.dir={tmp_path}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"lockstep: error: {tmp_path}/file cannot be written: No space left on device; make room")
    assert err.count("\n") == 1


def test_the_one_line_has_what_notes_say_of_the_place(tmp_path, monkeypatch, capsys):
    def fail(*arguments: object, **options: object) -> None:
        error = NoRoom("a turn leaves no room")
        error.add_note("in environment 'a:b',\nturn 3")
        raise error

    monkeypatch.setattr("lockstep.integration.grpo.main.run", fail)
    assert main([str(CONFIG), f"run.dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lockstep: error: a turn leaves no room; in environment 'a:b', turn 3"
    )


def test_a_rank_leaves_the_report_to_the_rank_that_failed(tmp_path, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    ended = iter([True, False])
    monkeypatch.setattr("lockstep.integration.grpo.main.run", fail)
    monkeypatch.setattr("lockstep.integration.grpo.main._is_ended_by_launcher", lambda *_: next(ended))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert main([str(CONFIG), f"run.dir={tmp_path}"]) == 1
    with pytest.raises(RuntimeError, match="Connection closed"):  # no other rank has ended: the error is ours to show
        main([str(CONFIG), f"run.dir={tmp_path}"])


@pytest.mark.parametrize(("num", "words"), [(12, "logprob_gap 0.0 without 12 samples |"), (0, "logprob_gap 0.0 |")])
def test_the_bar_says_of_how_many_samples_the_gap_is_not(tmp_path, capsys, num, words):
    log = RunLog(tmp_path, 4, 0, tensorboard=False)
    log.step(LINE | {"logprob_gap": 0.0, "samples_unmeasured": num})
    log.close(draws=False)
    assert words in capsys.readouterr().err
