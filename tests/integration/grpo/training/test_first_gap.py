"""A gap of the job: what the trainer reports of it, what is written, and that `explain` finds its cause there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.integration.cli import main as cli
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.first_gap import FirstGap, read_gap
from lockstep.integration.grpo.settings.config import load_config
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.packing import Sample
from lockstep.integration.grpo.training.trainer import GrpoTrainer, SampleGap
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.job_launcher import log_of, run_jobs
from lockstep.tests.support.random_models import random_model

RANKS = Ranks(0, 1, torch.device("cpu"))
CONFIG = Path(__file__).parents[4] / "configs" / "arithmetic_cpu.toml"


def samples_of(service: RolloutService) -> list[Sample]:
    params = SamplingParams(n=2, max_new_tokens=9, sampling_seed=3, ignore_eos=True)
    completions = service.engine.generate([[5, 6, 7] * 7, [9, 10]], params)
    return [Sample(c.prompt_ids, c.token_ids, c.logprobs, (-1.0) ** i) for i, c in enumerate(completions)]


@pytest.fixture
def trained():
    """Yield a trainer with its service, and the samples of its first step."""
    with process_group(RANKS, 30):
        engine = Engine(random_model("qwen3"), EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        service, settings = RolloutService(engine), TrainSettings(num_warmup_steps=0, microbatch_tokens=40)
        trainer = GrpoTrainer(
            engine.model, DdpBackend(settings, RANKS), settings, 1.0, RANKS, announce_step=service.optimizer_step
        )
        yield service, trainer, samples_of(service)


def test_the_trainer_reports_the_sample_with_the_largest_gap(trained):
    _, trainer, samples = trained
    found: list[tuple[int, float, SampleGap]] = []
    trainer.on_gap = lambda *gap: found.append(gap)
    wrong = list(samples)
    for index, off in ((1, 0.125), (2, 0.5), (3, 0.25)):
        logprobs = list(samples[index].logprobs)
        logprobs[4] += off
        wrong[index] = replace(samples[index], logprobs=tuple(logprobs))
    before = [parameter.clone() for parameter in trainer.backend.model.parameters()]

    def reported(step: int, gap: float, own: SampleGap) -> None:
        weights = trainer.backend.model.parameters()
        assert all(torch.equal(one, other) for one, other in zip(before, weights, strict=True))  # the ones drawn from
        found.append((step, gap, own))

    trainer.on_gap = reported
    stats = trainer.update(wrong, 0)
    [(step, gap, own)] = found
    assert step == 0
    assert gap == stats.logprob_gap == pytest.approx(0.5, abs=1e-5)
    assert own == SampleGap(gap, wrong[2])


def test_a_step_without_a_gap_reports_none(trained):
    _, trainer, samples = trained
    found = []
    trainer.on_gap = lambda *gap: found.append(gap)
    assert trainer.update(samples, 0).logprob_gap == 0.0
    assert found == []


def test_the_first_gap_is_written_once_and_explained(trained, tmp_path, capsys):
    service, trainer, samples = trained
    overrides = [f"run.dir={json.dumps(str(tmp_path))}", "run.name='r'", "rollout.temperature=1.0"]
    config = load_config(CONFIG, [*overrides, "model.dtype='float32'", "engine.k_blocks=1"])
    model, saved = service.engine.model.module, []

    def save_model(folder: Path) -> None:
        saved.append(folder)
        model.save_pretrained(folder)

    trainer.on_gap = FirstGap(config, RANKS, save_model)
    weight = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():  # what an engine with stale weights does: its samples are not of the trainer's
        weight[3, 4] *= 1.5
    assert trainer.update(samples, 7).logprob_gap > 0.0
    said = capsys.readouterr().out
    folder = tmp_path / "r" / "gap"
    assert "step 8: the engine's and the trainer's log-probabilities differ by up to" in said
    assert said.rstrip().endswith(f"lockstep explain {folder}")
    assert cli.main(["explain", str(folder)]) == 1  # both ways agree; what was reported does not
    out = capsys.readouterr().out
    assert "equal      every operation at every position, bit for bit" in out
    assert "log-probabilities part" in out
    trainer.update(samples, 8)
    assert saved == [folder / "model"]
    assert capsys.readouterr().out == ""


def test_a_folder_that_a_resumed_run_has_is_kept_once_it_is_whole(trained, tmp_path, capsys):
    _, _, samples = trained
    overrides = [f"run.dir={json.dumps(str(tmp_path))}", "run.name='r'"]
    config, folder, own = load_config(CONFIG, overrides), tmp_path / "r" / "gap", SampleGap(0.5, samples[0])
    (folder / "model").mkdir(parents=True)  # the job was killed after it had written the weights
    saved: list[Path] = []
    FirstGap(config, RANKS, saved.append)(3, 0.5, own)
    assert saved == [folder / "model"]
    assert "step 4: " in capsys.readouterr().out
    whole = read_gap(folder)
    assert whole is not None and whole.sequence["token_ids"] == list(samples[0].token_ids)
    FirstGap(config, RANKS, lambda _: pytest.fail("it saves again"))(5, 0.5, own)
    assert read_gap(folder) == whole


@pytest.mark.slow
def test_a_job_of_two_ranks_writes_its_gap_if_it_has_one(tmp_path, capsys):
    # Library products promise no equal bits. Where they give them nevertheless, there is nothing to write.
    run_jobs(tmp_path, 2, {"free": "engine.invariant=false run.num_steps=2"})
    gaps = [line["logprob_gap"] for line in log_of(tmp_path, "free")]
    folder = tmp_path / "runs" / "free" / "gap"
    assert folder.exists() == any(gaps)
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "lockstep explain runs/free/gap" in line]
    assert len(said) == any(gaps)
    if any(gaps):
        assert cli.main(["explain", str(folder)]) == 1
        assert "no-invariant" in capsys.readouterr().out
