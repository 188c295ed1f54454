"""The main job with every trainer and every sync of weights to the engines: the same digests and rewards."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.tests.support.job_launcher import log_of, run_jobs

TRAINERS = {
    "ddp": "trainer=ddp",
    "fsdp2": "trainer=fsdp2",
    "zero2": "trainer=deepspeed",
    "zero3": "trainer=deepspeed deepspeed.zero_stage=3",
}
SYNCS = {
    "in_place": "sync=in_place",
    "distributed": "sync=distributed",
    "tensor": "sync=tensor weights.bucket_bytes=64KiB",
    "disk": "sync=disk",
    "delta": "sync=delta",
    "separate": "sync=distributed engines=separate",
}
# Every trainer and every sync once, and the run with which all are compared.
EACH_ONCE = {"ddp": ("disk", "separate"), "fsdp2": ("distributed",), "zero2": ("tensor",), "zero3": ("delta",)}


def check(folder: Path, trainer: str, syncs: Sequence[str]) -> None:
    """Check that all of these runs have the results of `in_place`."""
    lines = {name: log_of(folder, f"{trainer}-{name}") for name in ("in_place", *syncs)}
    digests = {name: [line["weight_digest"] for line in of_run] for name, of_run in lines.items()}
    assert len(set(digests["in_place"])) == 3, "every step changes the weights"
    for name, of_run in lines.items():
        assert digests[name] == digests["in_place"], name
        for key in ("reward_mean", "loss", "eval_reward_mean"):
            assert [line.get(key) for line in of_run] == [line.get(key) for line in lines["in_place"]], (name, key)
        assert all(line["logprob_gap"] == 0.0 for line in of_run), name
        assert [line["weight_version"] for line in of_run] == ["1", "2", "3"]
    aliased = trainer in ("ddp", "zero2")
    assert all((line["sync_bytes"] == 0) == aliased for line in lines["in_place"])
    assert all(line["sync_bytes"] > 0 for name, of_run in lines.items() if name != "in_place" for line in of_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "syncs",
    [
        pytest.param(EACH_ONCE, id="each-once"),
        *(pytest.param({trainer: list(SYNCS)[1:]}, id=trainer, marks=pytest.mark.exhaustive) for trainer in TRAINERS),
    ],
)
def test_every_sync_gives_the_same_rewards_digests_and_a_gap_of_zero(tmp_path, syncs):
    if importlib.util.find_spec("deepspeed") is None:
        syncs = {trainer: names for trainer, names in syncs.items() if "deepspeed" not in TRAINERS[trainer]}
        if not syncs:
            pytest.skip("needs deepspeed")
    runs = {f"{trainer}-{name}": f"{TRAINERS[trainer]} {SYNCS[name]}" for trainer, names in syncs.items()
            for name in ("in_place", *names)}  # fmt: skip
    run_jobs(tmp_path, 2, runs)
    for trainer, names in syncs.items():
        check(tmp_path, trainer, names)
