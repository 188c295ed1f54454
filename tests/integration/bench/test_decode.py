"""Tests of the benchmarks of decode steps, memory and GPUs, on small loads: they test the counts, not the speed."""

import argparse
import cProfile
import json
import pstats

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from lockstep.integration.bench import decode, gpu, soak
from lockstep.integration.bench.parts import decode_load, decode_profile, machine_peaks, presets
from lockstep.integration.bench.parts.decode_load import DecodeWork
from lockstep.integration.bench.parts.machine_peaks import Peaks
from lockstep.integration.cli import main as cli
from lockstep.kernels.attention import paged
from lockstep.kernels.layers import rms_norm
from lockstep.kernels.linear import linear
from lockstep.kernels.machine import native
from lockstep.kernels.sampling import draws
from lockstep.rollout.loop import loop
from lockstep.rollout.running import sampler

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


def test_of_experts_those_count_that_a_batch_chooses():
    widths = {**presets.PRESETS["tiny"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    model = presets.random_model(widths, tie_word_embeddings=True, dtype=torch.bfloat16)
    in_experts = 4 * 8 * 3 * 256 * 384
    others = sum(parameter.numel() for parameter in model.parameters()) - in_experts
    one, many = (DecodeWork.of(model, batch, 0, 2048) for batch in (1, 32))
    assert one.num_bytes == 2 * (others + in_experts // 4) and one.num_operations == 2 * (others + in_experts // 4)
    assert many.num_bytes == pytest.approx(2 * (others + in_experts), rel=1e-3)
    assert many.num_operations == 32 * one.num_operations


def test_a_configuration_may_leave_the_size_of_a_head_to_be_computed():
    config = MixtralConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, num_local_experts=4, tie_word_embeddings=True,
    )  # fmt: skip
    assert config.head_dim is None
    model = MixtralForCausalLM(config).to(torch.bfloat16)
    assert decode.kv_bytes_per_token(model) == 2 * 2 * 2 * 16 * 2
    at_none, at_ten = (DecodeWork.of(model, 1, context, 0).num_operations for context in (0, 10))
    assert at_ten - at_none == 4 * 4 * 16 * 10 * 2


def test_a_model_without_attention_is_refused_by_name(make_model, tmp_path, capsys):
    make_model("mamba2").save_pretrained(tmp_path / "model")
    assert cli.main(["bench", "decode", "--model", str(tmp_path / "model")]) == 2
    assert "has no attention: steps are timed over random KV" in capsys.readouterr().err


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
        assert contexts == [[contexts[0][0]] * 3], "four steps of one schedule"
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
    assert report["left_out"] == "4 x 700 (memory)"
    assert all(cell["step_ms"] > 0 and cell["floor_ms"] > 0 for cell in report["steps"])
    assert sum(part["share"] for part in report["profile"]) == pytest.approx(1.0, abs=1e-3)
    assert {"products", "attention", "sampler"} <= {part["part"] for part in report["profile"]}


def test_the_hosts_time_is_that_of_steps_that_replay_without_the_replay(tiny):
    engine = decode_load.make_decode_engine(tiny, 2, 40, 6, invariant=True)
    host, replays = decode_profile.HostTime(engine, 2), []
    seconds = decode_load.decode_steps(engine, 2, 40, 6, host)
    record = decode_profile._record_of(engine, 2)
    if record is None:  # no C++ kernels here
        assert host.seconds == []
        return
    assert len(host.seconds) == 6 and all(0 < own < all_of for own, all_of in zip(host.seconds, seconds, strict=True))
    record.replay = lambda: replays.append(1) or record.results
    host(engine.step)
    assert len(host.seconds) == 6
    assert "replay" not in vars(record) and not replays  # no step was left to run
    engine.close()


def test_a_plot_is_drawn_with_a_line_a_context(tmp_path):
    pytest.importorskip("matplotlib")
    table = [{"batch": b, "context": c, "step_ms": b * 1.0, "floor_ms": 0.5} for b in (1, 2) for c in (128, 512)]
    path = tmp_path / "steps.svg"
    decode.plot({"model": "tiny", "dtype": "bfloat16", "device": "cpu"}, table, path)
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("path", "part"),
    [(linear.__file__, "products"), ("/x/torch/nn/modules/linear.py", "products"), (paged.__file__, "attention"),
     (draws.__file__, "sampler"), (sampler.__file__, "sampler"), (rms_norm.__file__, "norms, rotary, activation"),
     (loop.__file__, "scheduling"), ("/x/transformers/models/qwen3/modeling_qwen3.py", "module code"),
     ("/usr/lib/enum.py", "other Python")],
)  # fmt: skip
def test_a_file_belongs_to_one_part_of_the_profile(path, part):
    assert decode_profile.part_of(path) == part


@pytest.mark.skipif(native.load(linear.SOURCE) is None, reason="needs a C++ compiler")
def test_the_time_in_a_kernel_counts_for_the_function_that_calls_it():
    x, weight = torch.randn(64, 1024), torch.randn(1024, 1024)
    linear.native_product(x, weight, None)
    profiler = cProfile.Profile()
    profiler.runcall(lambda: [linear.native_product(x, weight, None) for _ in range(5)])
    assert decode_profile.shares(pstats.Stats(profiler))["products"] > 0.9


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
def test_what_the_gpu_benchmark_measures_runs_on_any_device(tiny, tmp_path):
    options = options_of(gpu, "--batch", "2", "--context", "32", "--steps", "2", "--kernel-batch", "2", "--pauses", "1")
    options.rows, options.new_tokens, options.out = (1, 3), 4, tmp_path / "gpu.json"
    report = gpu.measure(tiny, options, PEAKS)
    assert "failed" not in report, report["failed"]
    ways = [(row["batch"], row["invariant"], row["overlap"]) for row in report["roofline"]]
    assert ways == [(2, True, True), (2, True, False), (2, False, True)]
    kernels = {row["kernel"]: row["ms"] for row in report["kernels"]}
    assert len(kernels) == 10 and min(kernels.values()) > 0
    products = {row["kernel"]: row["ms"] for row in report["products"]}
    assert len(products) == 20 and min(products.values()) > 0 and "gate|up, library's, 3 rows" in products
    assert min(report["pause_in_place_ms_p50"], report["commit_ms"], report["digest_gb_s"]) > 0
    assert report["profile"][0]["launches"] > 10 and report["training"][0]["sdpa_ms"] > 0
    assert len(report["rollout"]) == 3
    assert json.loads(options.out.read_text()) == json.loads(json.dumps(report))
    assert not any(parameter.requires_grad for parameter in tiny.model.layers[0].parameters())


def test_a_part_that_fails_is_noted_and_the_next_one_runs(tiny, tmp_path, monkeypatch):
    def fails(bench):
        bench.report.add("kernels", {"kernel": "first"})
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(gpu.PARTS, "kernels", fails)
    out = tmp_path / "gpu.json"
    options = options_of(gpu, "--parts", "kernels", "peaks", "--out", str(out))
    report = gpu.measure(tiny, options, PEAKS)
    assert report["failed"] == [{"part": "kernels", "error": "RuntimeError: no such instruction"}]
    assert report["kernels"] == [{"kernel": "first"}] and report["read_gb_s"] > 0
    assert json.loads(out.read_text()) == report


def test_no_part_begins_after_the_budget(tiny, monkeypatch):
    monkeypatch.setattr(gpu.Report, "is_over", True)
    report = gpu.measure(tiny, options_of(gpu, "--parts", "weights", "pauses"), PEAKS)
    assert report["skipped"] == [{"part": "weights"}, {"part": "pauses"}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_benchmark_runs_on_a_gpu():
    report = gpu.run(options_of(gpu, "--model", "tiny", "--batch", "4", "--context", "64", "--pauses", "1"))
    assert report["device"] != "cpu" and report["digest_gb_s"] > 0
    assert "failed" not in report, "a part that fails is noted: gradients are captured on the stream of their forward"
    assert all(row["of_floor"] <= 1 for row in report["roofline"]), "a step without its forward was recorded"


def options_of(module, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)
