"""Tests of the benchmarks of decode steps, memory and GPUs, on small loads: they test the counts, not the speed."""

import argparse
import json

import pytest
import torch

from lockstep.integration.bench import decode, gpu, soak
from lockstep.integration.bench.parts import decode_load, decode_profile, machine_peaks, presets
from lockstep.integration.bench.parts.decode_load import DecodeWork
from lockstep.integration.bench.parts.machine_peaks import Peaks
from lockstep.integration.cli import main as cli

PEAKS = Peaks(bytes_per_s=1e9, operations_per_s=1e10)


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    """Run with one thread: these models are too small for more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    return presets.load_model("tiny")


def test_the_work_of_a_step_is_its_weights_once_and_the_kv_of_every_sequence(tiny):
    num_weights = sum(parameter.numel() for parameter in tiny.parameters())
    assert decode.kv_bytes_per_token(tiny) == 4 * 2 * 4 * 32 * 2  # layers, keys and values, heads, width, bytes
    work = DecodeWork.of(tiny, 3, 100, decode.kv_bytes_per_token(tiny))
    assert work.num_bytes == 2 * num_weights + 3 * 100 * 2048
    assert work.num_operations == 3 * (2 * num_weights + 4 * 256 * 100 * 4)
    assert PEAKS.floor_seconds(1e9, 1e9) == 1.0 and PEAKS.floor_seconds(1e6, 1e10) == 1.0


def test_decode_steps_run_at_the_context_that_was_asked_for_without_its_prefill(tiny):
    engine = decode_load.make_decode_engine(tiny, 3, 300, 4, invariant=True)
    contexts, sequences = [], engine.parts.sequences

    def around(step):
        contexts.append([len(request.sequence.token_ids) for request in sequences.requests()])
        step()

    for _ in range(2):  # an engine can do it again
        contexts.clear()
        num_rows = engine.metrics.num_rows
        assert len(decode_load.decode_steps(engine, 3, 300, 4, around)) == 4
        assert not engine.has_work
        assert contexts == [[length] * 3 for length in range(contexts[0][0], contexts[0][0] + 4)]
        assert abs(contexts[0][0] - 300) < 8
        assert engine.metrics.num_rows - num_rows == 3 * (300 - 4 // 2 + 4)  # prompts, warm-up, measured steps
    engine.close()


def test_the_report_has_every_cell_that_fits_and_a_profile_whose_parts_add_up(monkeypatch, capsys):
    monkeypatch.setattr(machine_peaks, "_BUFFER_BYTES", 1 << 20)  # only what they measure depends on it
    monkeypatch.setattr(machine_peaks, "_PRODUCT_SIZE", 64)
    arguments = ["--model", "tiny", "--batch", "1", "4", "--context", "32", "700", "--steps", "2", "--threads", "1"]
    arguments += ["--profile-batch", "2", "--profile-context", "40", "--profile-steps", "2"]
    arguments += ["--max-kv-gib", str(1000 * 2048 / 2**30), "--json"]
    assert cli.main(["bench", "decode", *arguments]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["batch"], cell["context"]) for cell in report["steps"]] == [(1, 32), (4, 32), (1, 700)]
    assert report["left_out"] == "4 x 700"
    assert all(cell["step_ms"] > 0 and cell["floor_ms"] > 0 for cell in report["steps"])
    assert sum(part["share"] for part in report["profile"]) == pytest.approx(1.0, abs=1e-3)
    assert {"products", "attention", "sampler"} <= {part["part"] for part in report["profile"]}


def test_a_plot_is_drawn_with_a_line_a_context(tmp_path):
    pytest.importorskip("matplotlib")
    table = [{"batch": b, "context": c, "step_ms": b * 1.0, "floor_ms": 0.5} for b in (1, 2) for c in (128, 512)]
    path = tmp_path / "steps.svg"
    decode.plot({"model": "tiny", "dtype": "bfloat16", "device": "cpu"}, table, path)
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("path", "part"),
    [("/x/kernels/linear.py", "products"), ("/x/torch/nn/modules/linear.py", "products"),
     ("/x/kernels/native_attention.py", "attention"), ("/x/rollout/sampler.py", "sampler"),
     ("/x/kernels/rms_norm.py", "norms, rotary, activation"), ("/x/rollout/loop.py", "scheduling"),
     ("/x/transformers/models/qwen3/modeling_qwen3.py", "module code"), ("/usr/lib/enum.py", "other Python")],
)  # fmt: skip
def test_a_file_belongs_to_one_part_of_the_profile(path, part):
    assert decode_profile.part_of(path) == part


# -- soak ------------------------------------------------------------------------------------------


def test_the_verdict_compares_the_peaks_of_the_first_and_last_tenth_after_the_warm_up():
    flat = [50] * 10 + [100] * 100
    assert soak.verdict(flat)["passed"]
    assert soak.verdict(flat)["growth"] == 0
    leak = [50] * 10 + [1000 + index for index in range(100)]
    assert soak.verdict(leak)["growth"] == pytest.approx(1099 / 1009 - 1, abs=1e-5)
    assert not soak.verdict(leak)["passed"]


def test_the_soak_load_ends_aborts_and_hits_prefixes():
    report = soak.run(options_of(soak, "--steps", "250"))
    assert min(report["num_ended"], report["num_aborted"], report["num_cached_tokens"]) > 0
    with pytest.raises(ValueError, match="a tenth of less than 200"):
        soak.run(options_of(soak, "--steps", "50"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "num_steps"),
    [("--overlap", 5000), ("--no-overlap", 2000), pytest.param("--no-overlap", 6000, marks=pytest.mark.exhaustive)],
)
def test_memory_stays_flat(overlap, num_steps):
    report = soak.run(options_of(soak, "--steps", str(num_steps), overlap))
    assert report["passed"], report


# -- gpu -------------------------------------------------------------------------------------------


def test_the_gpu_benchmark_refuses_a_machine_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "gpu"]) == 2
    assert "bench gpu needs a CUDA device, and torch sees none here" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_gpu_benchmark_measures_runs_on_any_device(tiny):
    options = options_of(gpu, "--batch", "2", "--context", "32", "--steps", "2", "--kernel-batch", "2", "--pauses", "1")
    report = gpu.measure(tiny, options, PEAKS)
    assert [(row["batch"], row["invariant"]) for row in report["roofline"]] == [(2, True), (2, False)]
    kernels = {row["kernel"]: row["ms"] for row in report["kernels"]}
    assert len(kernels) == 14 and min(kernels.values()) > 0
    assert min(report["pause_in_place_ms_p50"], report["commit_ms"], report["digest_gb_s"]) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_benchmark_runs_on_a_gpu():
    report = gpu.run(options_of(gpu, "--model", "tiny", "--batch", "4", "--context", "64", "--pauses", "1"))
    assert report["device"] != "cpu" and report["digest_gb_s"] > 0


def options_of(module, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)
