"""The main job with engines of several ranks: the same rewards, digests and metrics as with one engine in each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.integration.bench.parts.ports import HOST
from lockstep.integration.grpo.settings.config import load_config
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.job_launcher import CONFIG, finish, jobs, log_of, run_jobs, start_agent

LAYOUTS = {"dp2": "", "tp2": "parallel.tp=2", "pp2": "parallel.pp=2"}
SAME = ("reward_mean", "loss", "kl", "grad_norm", "eval_reward_mean", "weight_version", "weight_digest", "logprob_gap")


def lines_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [{key: line.get(key) for key in SAME} for line in log_of(folder, name)]


def check_same(lines: dict[str, list[dict[str, object]]]) -> None:
    first, *others = lines
    assert len({line["weight_digest"] for line in lines[first]}) == 3, "every step changes the weights"
    assert all(line["logprob_gap"] == 0.0 for line in lines[first])
    for other in others:
        assert lines[other] == lines[first], other


@pytest.fixture(scope="module")
def lines_of_ddp(tmp_path_factory) -> dict[str, list[dict[str, object]]]:
    """Run the job with each layout, on two ranks of one agent. Returns its lines of metrics by layout."""
    folder = tmp_path_factory.mktemp("ddp")
    run_jobs(folder, 2, {name: f"trainer=ddp {layout}" for name, layout in LAYOUTS.items()})
    return {name: lines_of(folder, name) for name in LAYOUTS}


@pytest.mark.slow
def test_the_job_gives_the_same_numbers_however_its_ranks_share_engines(lines_of_ddp):
    check_same(lines_of_ddp)


@pytest.mark.exhaustive
def test_the_job_gives_the_same_numbers_with_fsdp2_however_its_ranks_share_engines(tmp_path):
    run_jobs(tmp_path, 2, {name: f"trainer=fsdp2 {layout}" for name, layout in LAYOUTS.items()})
    check_same({name: lines_of(tmp_path, name) for name in LAYOUTS})


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(("parallel.tp=2 parallel.pp=2",), id="tp2-pp2"),
        pytest.param(("parallel.tp=2", "parallel.pp=2"), id="tp2,pp2", marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_of_several_of_four_ranks_give_the_numbers_of_four_engines(tmp_path, layouts):
    pytest.importorskip("deepspeed")
    names = {f"zero-{index}": f"trainer=deepspeed deepspeed.zero_stage=3 {layout}"
             for index, layout in enumerate(("", *layouts))}  # fmt: skip
    run_jobs(tmp_path, 4, names)
    check_same({name: lines_of(tmp_path, name) for name in names})


@pytest.mark.slow
def test_two_agents_give_the_numbers_of_one(lines_of_ddp, tmp_path):
    """The two agents are two nodes for torchrun, on one host."""
    runs = {name: f"trainer=ddp {LAYOUTS[name]}" for name in ("dp2", "tp2")}
    port = free_port()
    nodes = [
        start_agent(
            tmp_path, "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two",
            "--rdzv-endpoint", f"{HOST}:{port}", "--local-addr", HOST, *jobs(runs), log=f"log-of-node-{node}",
        )
        for node in range(2)
    ]  # fmt: skip
    finish(nodes, tmp_path)
    check_same({"one agent": lines_of_ddp["dp2"], **{name: lines_of(tmp_path, name) for name in runs}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=0"], "parallel.tp must be at least 1"),
        (["parallel.tp=2"], "engine.k_blocks must be a multiple of parallel.tp=2 in invariant mode, not 1"),
        (["parallel.pp=2", "sync=disk"], "sync must be \"in_place\", not 'disk'"),
        (["parallel.pp=2", "sync=tensor", "engines=separate"], "sync must be \"in_place\", not 'tensor'"),
        (["parallel.ep=2"], "unknown key parallel.ep"),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        load_config(CONFIG, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pp=3"], "parallel: 4 ranks cannot be divided into replicas of tp=1 x pp=3"),
        (["parallel.pp=4", "model.num_layers=3"], "parallel: pp=4 stages need at least as many layers"),
        (["parallel.tp=4", "engine.k_blocks=4", "model.num_heads=6", "model.num_kv_heads=3"], "not divide by tp=4"),
    ],
)
def test_a_job_that_cannot_be_divided_is_refused_before_it_starts(overrides, message):
    pytest.importorskip("matplotlib")
    from lockstep.integration.grpo.planning.checks import check_job

    with pytest.raises(ValueError, match=message):
        check_job(load_config(CONFIG, overrides), num_ranks=4)


@pytest.mark.parametrize("key", ["model.path", "data.path", "run.replay_schedule"])
def test_an_input_in_the_runs_own_folder_is_refused_before_the_folder_is_moved(tmp_path, key):
    pytest.importorskip("matplotlib")
    from lockstep.integration.grpo.planning.checks import check_job

    inside = tmp_path / "mine" / "model"
    inside.mkdir(parents=True)
    own = [f"run.dir={tmp_path}", "run.name=mine", f"{key}={inside}"]
    if key == "run.replay_schedule":
        own += ["rollout.on_commit=keep", "rollout.ahead=1"]
    with pytest.raises(ValueError, match=f"{key}: .* is in the folder of this very run"):
        check_job(load_config(CONFIG, own), num_ranks=1)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_runs_name_is_one_of_a_folder(name):
    with pytest.raises(ValueError, match=r"name.*must be a folder name"):
        load_config(CONFIG, [f"run.name={name}"])


def test_the_plan_states_the_mesh_and_what_a_rank_holds_of_the_engine():
    from lockstep.integration.grpo.planning.description import describe_plan

    alone = describe_plan(load_config(CONFIG), num_ranks=8)
    assert "mesh       dp=8 x pp=1 x tp=1: 8 replicas of 1 rank" in alone and "aliases its weights" in alone
    shared = describe_plan(load_config(CONFIG, ["parallel.tp=2", "parallel.pp=2", "engine.k_blocks=2"]), num_ranks=8)
    assert "mesh       dp=2 x pp=2 x tp=2: 2 replicas of 4 ranks: 2 stages of 2 ranks" in shared
    assert "the engine's copy 0.6 MiB" in shared and "each rank copies its part" in shared
    assert "at about 512 bytes a token" in shared and "at about 2048 bytes a token" in alone
