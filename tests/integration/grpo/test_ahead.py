"""The main job with rollouts ahead of training: digests and rewards are those of the job without."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.integration.grpo.engines.answers import lag_of
from lockstep.integration.grpo.planning.checks import check_job
from lockstep.integration.grpo.planning.description import describe_plan
from lockstep.integration.grpo.settings.config import load_config
from lockstep.rollout.completion import WeightSpan
from lockstep.tests.integration.grpo import test_job
from lockstep.tests.support import prepared_python
from lockstep.tests.support.job_launcher import CONFIG, log_of, run_jobs

SAME = ("reward_mean", "loss", "kl", "grad_norm", "eval_reward_mean", "weight_version", "weight_digest", "logprob_gap")
# Large steps, so that many tokens differ after each of them, and answers of many lengths.
MORE = (
    "run.num_steps=20 run.eval_every=7 rollout.max_new_tokens=14 train.learning_rate=2e-3 reward=slow_rewards:by_text"
)
AHEAD = {
    "shared": "rollout.ahead=2",
    "pushed": "sync=tensor rollout.ahead=1",
    "separate": "sync=distributed engines=separate rollout.ahead=1",
    "far": "sync=tensor engines=separate rollout.ahead=3 engine.max_num_seqs=10",
}
TP2 = "parallel.tp=2 rollout.ahead=1"
# Delays at random in the trainer, and in the engine's process where it has one of its own. They change no value.
SLOW_REWARDS = """
import os, random, signal, threading, time
from pathlib import Path

from lockstep.tests.support.prepared_python import is_engine

draw = random.Random(os.getpid())

def engines():
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if is_engine(int(pid)):
            yield int(pid)

def by_text(prompt, completion, answer):
    if draw.random() < 0.05:
        time.sleep(draw.uniform(0, 0.1))
    if draw.random() < 0.05:
        for pid in engines():
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(draw.uniform(0, 0.3), os.kill, (pid, signal.SIGCONT)).start()
    return float(sum(map(ord, completion)) % 3)
"""


def lines_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [{key: line.get(key) for key in SAME} for line in log_of(folder, name)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "num_steps", "trainer", "runs"),
    [
        pytest.param(1, 10, "ddp", {name: AHEAD[name] for name in ("pushed", "far")}, id="one rank"),
        pytest.param(2, 6, "ddp", {n: AHEAD[n] for n in ("shared", "separate")} | {"tp2": TP2}, id="two ranks"),
        *(
            pytest.param(*case, id=f"{case[2]} {number}", marks=pytest.mark.exhaustive)
            for number, case in enumerate([
                (1, 20, "ddp", AHEAD), (2, 20, "ddp", AHEAD | {"tp2": TP2, "pp2": "parallel.pp=2 rollout.ahead=2"}),
                (2, 20, "fsdp2", {"gathered": "rollout.ahead=1"}),
            ])
        ),
    ],
)  # fmt: skip
def test_a_run_ahead_has_the_rewards_and_digests_of_the_run_without(tmp_path, num_ranks, num_steps, trainer, runs):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARDS)
    common = f"{MORE} run.num_steps={num_steps} trainer={trainer}"
    run_jobs(tmp_path, num_ranks, {name: f"{common} {more}" for name, more in ({"plain": ""} | runs).items()})
    expected = lines_of(tmp_path, "plain")
    assert len({line["weight_digest"] for line in expected}) == num_steps, "every step changes the weights"
    assert all(line["verified_tokens"] == 0 for line in log_of(tmp_path, "plain"))
    for name in runs:
        assert lines_of(tmp_path, name) == expected, name
        lines = log_of(tmp_path, name)
        assert all(line["logprob_gap"] == 0.0 and line["lag_max"] == 0 for line in lines), name
        if name in ("separate", "far"):  # they went on beside training
            assert sum(line["verified_tokens"] for line in lines) > 0, name
            assert any(line["kept_share"] not in (None, 1.0) for line in lines), name
            assert any(line["wait_s"] > 0 for line in lines), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["rollout.ahead=2"], id="shared", marks=pytest.mark.exhaustive),
        pytest.param(["engines=separate", "sync=distributed", "rollout.ahead=1"], id="separate"),
    ],
)
def test_a_run_ahead_that_is_killed_and_resumed_ends_as_one_without(tmp_path, settings):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    first = test_job.torchrun(straight, str(test_job.CONFIG), *test_job.SHRUNK)
    assert test_job.finish(first) == 0, (straight / "log").read_text()
    os.symlink(straight / ".cache", killed / ".cache")
    arguments = [str(test_job.CONFIG), *test_job.SHRUNK, *settings]
    engines = {prepared_python.FORKS_ENGINES: 1}
    process = test_job.torchrun(killed, *arguments, KILL_AFTER_STEP=3, **engines)
    assert test_job.finish(process) == -signal.SIGKILL
    resumed = test_job.torchrun(killed, *arguments, "--resume", **engines)
    assert test_job.finish(resumed) == 0, (killed / "log").read_text()
    expected, lines = test_job.lines_of(straight), test_job.lines_of(killed)
    for line in (*expected, *lines):
        del line["sync_bytes"]  # they differ between shared and separate engines
    assert lines == expected


@pytest.mark.slow
def test_keep_and_drop_train_on_tokens_of_older_weights_and_say_so(tmp_path):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARDS)
    separate = f"{MORE} sync=tensor engines=separate run.num_steps=5"
    run_jobs(tmp_path, 1, {
        "keep": f"{separate} rollout.ahead=2 rollout.on_commit=keep rollout.max_lag=2",
        "capped": f"{separate} rollout.ahead=2 rollout.on_commit=keep rollout.max_lag=1 train.sequence_bound=3.0",
        "keep_kv": f"{separate} rollout.ahead=1 rollout.on_commit=keep rollout.keep_kv=true",
        "drop": f"{separate} rollout.ahead=3 rollout.on_commit=drop rollout.max_lag=1",
    })  # fmt: skip
    logs = {name: log_of(tmp_path, name) for name in ("keep", "capped", "keep_kv", "drop")}
    assert all(len(lines) == 5 for lines in logs.values())
    assert max(line["lag_max"] for line in logs["keep"]) == 2
    assert max(line["lag_max"] for line in logs["capped"]) == 1
    assert max(line["lag_max"] for line in logs["drop"]) == 1
    assert sum(line["dropped_tokens"] for line in logs["drop"]) > 0
    assert all(line["verified_tokens"] == 0 for lines in logs.values() for line in lines)
    for name in ("keep", "capped", "drop"):  # of tokens that the present weights have drawn
        assert all(line["logprob_gap"] == 0.0 for line in logs[name]), name
    older = [line for lines in logs.values() for line in lines if line["lag_max"]]
    for line in older:
        assert 0.5 < line["ratio_mean"] < 2 and line["ratio_max"] >= line["ratio_mean"], line
        assert 0 <= line["ratio_bounded"] <= 1 and 0 <= line["ratio_dropped"] <= 1
    assert older and all(("ratio_mean" in line) == (line["lag_max"] > 0) for lines in logs.values() for line in lines)


@pytest.mark.slow
def test_a_run_whose_engine_has_two_ranks_is_repeated_from_its_schedule(tmp_path):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARDS)
    settings = f"{MORE} run.num_steps=4 parallel.tp=2 rollout.ahead=1 rollout.on_commit=keep"
    run_jobs(tmp_path, 2, {"tp2": settings})
    run_jobs(tmp_path, 2, {"tp2-again": f"{settings} run.replay_schedule=runs/tp2/schedule.jsonl"})
    assert lines_of(tmp_path, "tp2-again") == lines_of(tmp_path, "tp2")
    assert any(line["lag_mean"] > 0 for line in log_of(tmp_path, "tp2"))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_runs_that_were_timed_are_repeated_from_their_schedules(tmp_path, num_ranks):
    (tmp_path / "slow_rewards.py").write_text(SLOW_REWARDS)
    runs = {
        "keep": "sync=tensor engines=separate rollout.ahead=2 rollout.on_commit=keep rollout.max_lag=2",
        "drop": "sync=tensor engines=separate rollout.ahead=3 rollout.on_commit=drop rollout.max_lag=1",
        "shared": "rollout.ahead=1 rollout.on_commit=keep",
    }
    common = f"{MORE} run.num_steps=6"
    run_jobs(tmp_path, num_ranks, {name: f"{common} {settings}" for name, settings in runs.items()})
    again = {f"{name}-again": f"{common} {settings} run.replay_schedule=runs/{name}/schedule.jsonl"
             for name, settings in runs.items()}  # fmt: skip
    again["elsewhere"] = f"{again['keep-again']} engines=local"  # not beside training, and yet the same
    run_jobs(tmp_path, num_ranks, again)
    for name in again:
        of = name.removesuffix("-again") if name != "elsewhere" else "keep"
        assert lines_of(tmp_path, name) == lines_of(tmp_path, of), name
    assert any(line["lag_mean"] > 0 for line in log_of(tmp_path, "keep"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.replay_schedule=x"], "run.replay_schedule repeats runs with rollout.ahead"),
        (["rollout.ahead=-1"], "rollout.ahead must not be negative, not -1"),
        (["rollout.max_lag=-2"], "rollout.max_lag must not be negative, not -2"),
        (["rollout.on_commit=throw"], 'rollout.on_commit must be "verify", "keep" or "drop", not \'throw\''),
        (["rollout.keep_kv=true"], 'rollout.keep_kv must be false with on_commit="verify"'),
        (["rollout.keep_kv=true", "rollout.on_commit=keep"], 'rollout.keep_kv needs engines="separate"'),
        (["train.sequence_bound=0.5"], "train.sequence_bound must be 0 or more than 1, not 0.5"),
        (["train.importance_bound=0"], "train.importance_bound must be positive"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError) as refused:
        load_config(CONFIG, overrides)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.ahead=1"], ["the next step fill the places", "within the rollout phase only", "rollout.ahead=0"]),
        (["rollout.ahead=2", "engines=separate", "sync=tensor"], ["the next 2 steps", "beside training too"]),
        (
            ["rollout.ahead=4", "rollout.on_commit=keep"],
            ["the next step", "KV computed anew: tokens of up to 1 commit ago"],
        ),
        (["rollout.ahead=4", "rollout.on_commit=drop"], ["the next 4 steps", "begun more than 1 commit ago"]),
    ],
)
def test_the_plan_says_what_overlaps(overrides, said):
    plan = describe_plan(load_config(CONFIG, overrides), 2)
    assert all(text in plan for text in said), plan
    assert "ahead" not in describe_plan(load_config(CONFIG), 2)


@pytest.mark.parametrize(("version", "lag"), [("7", 0), ("5", 2), ("default", 0), ("mine", 0), ("9" * 5000, 0)])
def test_a_label_that_an_administrator_gave_the_present_weights_is_no_lag(version, lag):
    assert lag_of(WeightSpan(version, None, 0, 3), 7) == lag


@pytest.mark.parametrize(("num_done", "version"), [(0, None), (2, "1"), (3, None)])
def test_a_replay_goes_on_only_where_no_older_weights_are_needed(tmp_path, num_done, version):
    pytest.importorskip("matplotlib")
    pytest.importorskip("matplotlib")
    versions = {1: [["0", 4]], 2: [["0", 1], ["1", 3]], 3: [["1", 2], ["2", 2]], 4: [["3", 4]]}
    lines = [json.dumps({"step": step, "spans": [[spans]]}) for step, spans in versions.items()]
    (tmp_path / "schedule.jsonl").write_text("\n".join(lines))
    if num_done:
        (tmp_path / "mine" / "checkpoints" / f"step-{num_done:06}").mkdir(parents=True)
    overrides = [f"run.dir={tmp_path}", "run.name=mine", f"run.replay_schedule={tmp_path}/schedule.jsonl",
                 "rollout.on_commit=keep", "rollout.ahead=1"]  # fmt: skip
    message = f"step 3 of .* has tokens of the weights after step {version}, and --resume goes on with those after"
    with pytest.raises(ValueError, match=message) if version else nullcontext():
        check_job(load_config(CONFIG, overrides), num_ranks=1, resume=True)
    check_job(load_config(CONFIG, overrides), num_ranks=1)
