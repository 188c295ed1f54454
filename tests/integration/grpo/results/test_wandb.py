"""Metrics in Weights & Biases: the calls that its package gets, and what becomes of its errors."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from importlib.util import find_spec
from types import ModuleType

import pytest

from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.results.run_log import RunLog
from lockstep.integration.grpo.results.wandb_log import WandbLog
from lockstep.integration.grpo.settings.config import JobConfig
from lockstep.integration.grpo.settings.sections import RunSettings


class Recorded(ModuleType):
    """A stand-in for the package, which is not in the test environment: it keeps what it is asked."""

    class Error(Exception):
        """The package's base class of errors."""

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.lines, self.ends, self.fails_at = [], [], [], None

    def init(self, **settings):
        if settings["project"] == "refused":
            raise self.Error("No API key configured")
        self.begun.append(settings)
        return self

    def log(self, numbers, step):
        if step == self.fails_at:
            raise self.Error("gone")
        self.lines.append((step, numbers))

    def finish(self, exit_code):
        self.ends.append(exit_code)


@pytest.fixture
def package(monkeypatch):
    package = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def line(step):
    seconds = {"rollout_s": 1.0, "train_s": 1.0, "sync_s": 0.0}
    numbers = {"step": step, "reward_mean": 0.25 * step, "logprob_gap": 0.0, "rollout_tokens_per_s": 5.0, **seconds}
    return {**numbers, "weight_digest": "ab", "weight_version": "1", "kept_share": None}


def run(folder, first, end, num_steps=3):
    settings = asdict(JobConfig(RunSettings(folder.name, str(folder.parent), wandb="project")))
    log = RunLog(folder, num_steps, first, tensorboard=False, wandb=WandbLog("project", folder, settings))
    for step in range(first + 1, end + 1):
        log.step(line(step))
    log.close(draws=False)


def test_numbers_of_each_step_are_logged_and_a_resumed_run_goes_on(package, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    run(folder, 0, 2)
    run(folder, 2, 3)
    first, second = package.begun
    assert first == second and (first["project"], first["name"], first["dir"]) == ("project", "mine", str(folder))
    assert first["resume"] == "allow" and len(first["id"]) == 16
    assert first["config"]["rollout"]["group_size"] == 16 and json.dumps(first["config"])
    assert [step for step, _ in package.lines] == [1, 2, 3]
    assert package.lines[1][1] == {
        "reward_mean": 0.5, "logprob_gap": 0.0, "rollout_tokens_per_s": 5.0, "rollout_s": 1.0, "train_s": 1.0,
        "sync_s": 0.0,
    }  # fmt: skip
    assert package.ends == [1, 0]  # cut short, and whole
    other = tmp_path / "other"
    other.mkdir()
    run(other, 0, 1)
    assert package.begun[2]["id"] != first["id"]


def test_an_error_in_the_run_ends_the_view_and_not_the_run(package, tmp_path, caplog):
    package.fails_at = 2
    with caplog.at_level(logging.ERROR):
        run(tmp_path, 0, 3)
    assert [step for step, _ in package.lines] == [1] and package.ends == []
    assert len(caplog.records) == 1 and "the job goes on: gone" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_refused_run_is_named_by_its_key(package, tmp_path):
    with pytest.raises(ValueError, match=r"run\.wandb: No API key configured; WANDB_MODE=offline keeps"):
        WandbLog("refused", tmp_path, {})


def test_a_missing_package_is_named_with_its_extra_before_the_start(tmp_path, monkeypatch):
    if find_spec("wandb") is not None:
        pytest.skip("the package is there")
    (tmp_path / "wandb").mkdir()  # as an earlier run leaves it: no package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"wandb must be installed for run\.wandb, the extra `wandb`: pip install"):
        check_job(JobConfig(RunSettings("x", str(tmp_path), wandb="project")), 1)
