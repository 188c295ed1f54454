"""Tests of `lockstep bench sync` on a small model: its arithmetic, and delivery by every path."""

import argparse
import json
import mmap

import pytest
import torch

from lockstep.integration.bench import sync
from lockstep.integration.bench.parts.sync_raw import RawEnd, flat_model, memory, restart_peak
from lockstep.integration.bench.parts.sync_report import PATHS, Sample, report
from lockstep.integration.cli import main as cli

MIB = 1 << 20
# Keys that the benchmark promises.
PROMISED = {
    "raw_broadcast_gb_s", "distributed_gb_s", "raw_shm_gb_s", "tensor_gb_s", "disk_gb_s", "delta_1_ratio",
    "delta_5_ratio", "raw_hashlib_gb_s", "checksum_gb_s", "memcpy_gb_s", "bytes", "paths", "in_place_ms", "digest_s",
    "peak_extra_bytes", "num_repetitions",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    torch.set_num_threads(1)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sync.add_arguments(parser)
    return parser.parse_args(arguments)


def sample(**changes: float) -> Sample:
    """Build a sample of one second for each item, except for `changes`."""
    names = ("raw_broadcast", "raw_shm", "raw_hashlib", "checksum", "verify", "memcpy", "in_place", "digest")
    kinds = [*PATHS, *(f"{path} transaction" for path in PATHS)]
    return {**dict.fromkeys([*names, *kinds, "delta_1_ratio", "delta_5_ratio"], 1.0), **changes}


@pytest.mark.slow
def test_a_run_reports_every_path_and_both_ends_agree_after_each_push(capsys, tmp_path):
    folder = tmp_path / "updates"
    code = cli.main(
        ["bench", "sync", "--preset", "tiny", "--bucket-mib", "2", "--repetitions", "2", "--folder", str(folder),
         "--json"]
    )  # fmt: skip
    assert code == 0  # different digests would raise
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report) >= PROMISED
    assert report["bytes"] == 14_685_184 and report["bucket_bytes"] == 2 * MIB and report["num_repetitions"] == 2
    assert all(report[key] > 0 for key in PROMISED if key.endswith("_gb_s"))
    assert set(report["paths"]) == {"distributed", "tensor", "disk", "delta_1", "delta_5"}
    assert all(0 < path["plain_s"] < 60 and 0 < path["transaction_s"] < 60 for path in report["paths"].values())
    assert 0.001 < report["delta_1_ratio"] < report["delta_5_ratio"] < 0.05
    assert set(report["peak_extra_bytes"]) == {"distributed", "tensor", "disk", "delta"}
    # Both processes map the segment; it counts once.
    tensor = report["peak_extra_bytes"]["tensor"]
    assert min(tensor["sender"], tensor["receiver"]) > MIB
    assert tensor["total"] < tensor["sender"] + tensor["receiver"]
    assert len(report["bars"]) == 3 + 5 + 1 + 4
    assert report["all_met"] == all(bar["met"] for bar in report["bars"])
    assert list(folder.iterdir()) == []


def test_bars_are_ratios_within_a_repetition_and_the_median_of_them_counts():
    samples = [
        sample(raw_broadcast=0.95, distributed=1.0),
        sample(raw_broadcast=8.0, distributed=10.0),
        sample(raw_broadcast=2.0, distributed=1.0, **{"tensor transaction": 5.0}),
    ]
    made = report(samples, {"tensor": {"sender": 3, "receiver": 3, "total": 5}}, 10**9, 2)
    bars = {bar["bar"]: bar for bar in made["bars"]}
    assert bars["distributed / raw_broadcast"]["value"] == 0.95 and bars["distributed / raw_broadcast"]["met"]
    assert made["distributed_gb_s"] == 1.0 and made["raw_broadcast_gb_s"] == 0.5
    # (plain 1 + hash 1 + 2 memcpy 1) is 4: a transaction of 1 is a quarter of it.
    assert bars["tensor transaction / (plain + hash + 2 memcpy)"]["value"] == 0.25
    assert not bars["in place, ms"]["met"]
    assert bars["tensor peak extra / bucket"] == {
        "bar": "tensor peak extra / bucket", "value": 2.5, "limit": "<= 2", "met": False,
    }  # fmt: skip
    assert made["all_met"] is False


def test_a_changed_share_of_elements_is_the_density_and_positions_come_once():
    for density in (1e-5, 0.01, 0.05):
        positions = sync._random_positions(1_000_000, density, torch.Generator().manual_seed(0))
        assert positions.unique().numel() == positions.numel() == pytest.approx(1_000_000 * density, rel=0.05, abs=12)
        assert positions.min() >= 0 and positions.max() < 1_000_000
    assert sync._random_positions(1, 0.01, torch.Generator().manual_seed(0)).numel() <= 1


def test_the_block_is_the_model_and_raw_copies_move_all_of_it(tmp_path):
    model, block = flat_model("tiny")
    end = block.data_ptr() + block.numel()
    assert all(block.data_ptr() <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    raw, path, before = RawEnd(model, block), str(tmp_path / "segment"), block.clone()
    raw.attach(path, create=True)
    assert raw.write_segment() > 0
    block.zero_()
    assert raw.read_segment() > 0
    assert torch.equal(block, before)


def test_the_peak_of_memory_is_what_was_resident_at_most_since_it_was_restarted():
    touch(64 * MIB)
    before = restart_peak()
    assert before["peak"] < before["resident"] + MIB
    touch(32 * MIB)
    assert 31 * MIB < memory()["peak"] - before["resident"] < 40 * MIB
    assert memory()["resident"] < before["resident"] + 8 * MIB


def touch(num_bytes: int) -> None:
    """Map new memory, outside the allocator's, touch it and unmap it."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        for _ in range(num_bytes // MIB):
            pages.write(b"x" * MIB)


@pytest.mark.slow
def test_chaos_runs_schedules_instead():
    report = sync.run(options("--chaos", "2", "--seed", "1"))
    assert report["num_schedules"] == 2 and report["num_hangs"] == 0


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        sync.run(options("--repetitions", "0"))
