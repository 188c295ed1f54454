"""Tests of the benchmarks on small loads: they test the arithmetic, not the speed."""

import argparse
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from lockstep.integration.bench import overlap, pause, rollout, schedule
from lockstep.integration.bench.parts import presets, runs
from lockstep.integration.bench.parts.load import Load
from lockstep.integration.bench.parts.runs import Run, Work
from lockstep.integration.cli import main as cli
from lockstep.kernels.linear.linear import SOURCE
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.tests.support import prepared_python

LOAD = Load(batch=3, prompt_tokens=20, new_tokens=5)


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    """Run with one thread: these models are too small for more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    return presets.load_model("tiny", dtype="float32")


def test_presets_have_the_sizes_they_claim():
    for name, least, most in (("tiny", 7.0e6, 7.5e6), ("small", 94.5e6, 95.5e6), ("small-moe", 285e6, 287e6)):
        kind = Qwen3MoeForCausalLM if name == "small-moe" else Qwen3ForCausalLM
        with torch.device("meta"):
            model = kind(kind.config_class(**presets.PRESETS[name], tie_word_embeddings=True))
        assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


@pytest.mark.slow
def test_the_preset_with_recurrent_layers_has_the_size_it_claims_and_sane_logits():
    model = presets.load_model("small-qwen3.5", dtype="float32")
    assert 135.5e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 136.5e6
    assert model.config.layer_types == [*["linear_attention"] * 3, "full_attention"] * 3
    logits = model(torch.tensor(LOAD.prompts(16384, 0))).logits
    assert 0.7 < logits.std() < 1.5 and torch.isfinite(logits).all()


def test_a_preset_is_the_same_model_each_time_and_its_logits_are_sane(tiny):
    again = presets.load_model("tiny", dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(tiny.parameters(), again.parameters(), strict=True))
    assert tiny.lm_head.weight is tiny.model.embed_tokens.weight
    with torch.no_grad():
        logits = tiny(torch.tensor(LOAD.prompts(16384, 0))).logits
    assert 0.7 < logits.std() < 1.5
    assert torch.isfinite(logits).all()


def test_the_rotary_table_is_the_one_of_a_model_built_in_the_ordinary_way(tiny):
    ordinary = presets.Qwen3ForCausalLM(tiny.config)
    assert torch.equal(tiny.model.rotary_emb.inv_freq, ordinary.model.rotary_emb.inv_freq)


def test_repeats_have_prompts_of_their_own():
    assert LOAD.prompts(16384, 0) == LOAD.prompts(16384, 0)
    assert LOAD.prompts(16384, 0)[0][:16] != LOAD.prompts(16384, 1)[0][:16]


def test_our_run_separates_prefill_from_decode_and_hits_no_prefix(tiny):
    engine = runs.make_engine(tiny, LOAD, invariant=True)
    for repeat in range(2):
        run = runs.run_engine(engine, LOAD, LOAD.prompts(16384, repeat), repeat)
        assert len(run.decode_step_seconds) == LOAD.new_tokens - 1
        assert run.prefill_seconds + sum(run.decode_step_seconds) <= run.seconds
    assert engine.metrics.num_cached_tokens == 0
    assert engine.metrics.num_output_tokens == 2 * LOAD.batch * LOAD.new_tokens


def test_a_step_in_which_few_samples_of_a_group_compute_their_prompt_is_no_decode_step(tiny):
    load = Load(batch=32, prompt_tokens=24, new_tokens=4, group=32)  # 31 samples wait for the first one's block
    engine = runs.make_engine(tiny, load, invariant=True)
    run = runs.run_engine(engine, load, load.prompts(16384, 0), 0)
    assert engine.metrics.num_cached_tokens == 31 * 16
    # The first sample is a token ahead, so that two steps have a row of every sequence.
    assert len(run.decode_step_seconds) == 2
    assert run.prefill_seconds > 0
    engine.close()


def test_steps_with_drafts_are_neither_prefill_nor_decode_steps_of_one_row():
    decode = Work(num_steps=2, num_rows=8, num_sequences=8, num_drafted=0)
    assert decode.are_decodes_of(4) and not decode.has_prompts
    assert not decode.are_decodes_of(5)
    drafts = Work(num_steps=1, num_rows=7, num_sequences=4, num_drafted=3)
    assert not drafts.are_decodes_of(4) and not drafts.has_prompts
    prompt = Work(num_steps=1, num_rows=16, num_sequences=1, num_drafted=0)
    assert not prompt.are_decodes_of(16) and prompt.has_prompts
    nothing = Work(num_steps=0, num_rows=0, num_sequences=0, num_drafted=0)  # with overlap a call may only deliver
    assert not nothing.are_decodes_of(4) and not nothing.has_prompts


def test_our_run_with_overlap_ends_with_a_call_that_only_delivers(tiny):
    config = EngineConfig(kv_cache=runs.num_kv_blocks(LOAD), max_num_seqs=LOAD.batch, overlap=True)
    engine = Engine(tiny, config)
    run = runs.run_engine(engine, LOAD, LOAD.prompts(16384, 0), 0)
    assert 0 < len(run.decode_step_seconds) <= LOAD.new_tokens
    engine.close()


def test_transformers_runs_the_same_load_and_its_logprobs_are_those_of_its_tokens(tiny, monkeypatch):
    taken = {}

    class Spy(runs.LogprobRecorder):
        def finish(self, sequences):
            taken["sequences"], taken["logprobs"] = sequences, super().finish(sequences)
            return taken["logprobs"]

    monkeypatch.setattr(runs, "LogprobRecorder", Spy)
    runs.run_transformers(tiny, LOAD, LOAD.prompts(16384, 0), 0)
    sequences = taken["sequences"]
    assert sequences.shape == (LOAD.batch, LOAD.prompt_tokens + LOAD.new_tokens)
    with torch.no_grad():
        logprobs = F.log_softmax(tiny(sequences).logits[:, LOAD.prompt_tokens - 1 : -1], dim=-1)
    expected = logprobs.gather(-1, sequences[:, LOAD.prompt_tokens :, None]).squeeze(-1)
    torch.testing.assert_close(taken["logprobs"], expected, atol=1e-4, rtol=1e-4)


def test_the_report_takes_medians_and_pairs():
    load = Load(batch=2, prompt_tokens=10, new_tokens=50)  # 100 new tokens a repeat
    ours = [Run(1.0, 0.5, (0.01, 0.03)), Run(2.0, 0.4, (0.02,)), Run(0.5, 0.2, ())]
    theirs = [Run(4.0, 4.0, ()), Run(2.0, 2.0, ()), Run(1.0, 1.0, ())]
    assert rollout.report(load, {"ours": ours, "vllm": theirs}) == {
        "ours_tok_s": 100.0,
        "vllm_tok_s": 50.0,
        "ratio_vllm": 2.0,
        "prefill_tok_s": 50.0,
        "step_ms": 20.0,
        "spread": {"ours_tok_s": [50.0, 200.0], "ratio_vllm": [1.0, 4.0], "vllm_tok_s": [25.0, 100.0]},
    }


def test_a_limit_of_instructions_names_a_variable_of_each_side():
    assert set(rollout.LIMITS) < set(native.ISA_LEVELS)
    options = argparse.Namespace(max_isa="avx512_bf16")
    assert rollout.environment(options) == {
        "LOCKSTEP_MAX_ISA": "avx512_bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512",
    }  # fmt: skip
    assert rollout.environment(argparse.Namespace(max_isa=None)) == {}


@pytest.mark.slow
@pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs x86 vectors")
def test_a_limit_binds_all_sides_in_a_process_of_its_own_and_the_report_says_so(capfd):
    small = ["--model", "tiny", "--batch", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"]
    assert cli.main(["bench", "rollout", *small, "--against", "hf", "--max-isa", "avx2", "--json"]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["max_isa"] == "avx2" and report["torch_path"] == "AVX2" and report["ratio_hf"] > 0
    assert report["path"] == "float32 avx2, bfloat16 avx2 (LOCKSTEP_MAX_ISA=avx2)" and report["processor"]
    assert report["limits"] == "LOCKSTEP_MAX_ISA=avx2, ONEDNN_MAX_CPU_ISA=AVX2, ATEN_CPU_CAPABILITY=avx2"
    assert "LOCKSTEP_MAX_ISA" not in os.environ


def test_a_group_shares_its_prompt_and_groups_do_not():
    prompts = Load(6, 20, 5, group=3).prompts(16384, 0)
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3] == prompts[4] == prompts[5]
    with pytest.raises(ValueError, match="--batch 6 is not a multiple of --group 4"):
        Load(6, 20, 5, group=4)


def test_drawn_lengths_have_a_long_tail_about_the_mean_that_was_asked_for():
    load = Load(4000, 1, 100, lengths="lognormal")
    counts = sorted(load.counts(0))
    assert counts == sorted(load.counts(0)) != sorted(load.counts(1))
    assert 90 < load.num_new_tokens(0) / 4000 < 105  # the longest are cut
    assert counts[2000] < 80 and counts[0] >= 1 and counts[-1] == load.max_new_tokens == 400


def test_engines_end_each_sequence_at_its_drawn_length_and_groups_hit_the_prefix_cache(tiny):
    load = Load(4, 40, 6, group=2, lengths="lognormal")
    engine = runs.make_engine(tiny, load, invariant=True)
    prompts = load.prompts(16384, 0)
    assert runs.run_engine(engine, load, prompts, 0).seconds > 0
    assert engine.metrics.num_output_tokens == load.num_new_tokens(0)
    assert engine.metrics.num_cached_tokens == 2 * 32  # one member of each group hits the full blocks of the other
    assert runs.run_transformers(tiny, load, prompts, 0).seconds > 0


def test_a_load_beyond_the_context_is_refused(tiny):
    with pytest.raises(ValueError, match=r"5000 tokens .* exceed the context of 4096"):
        runs.make_engine(tiny, Load(1, 4000, 1000), invariant=True)


def test_the_command_prints_one_json_object_on_the_last_line():
    done = prepared_python.run(
        [sys.executable, "-m", "lockstep.integration.cli", "bench", "rollout", "--model", "tiny", "--batch", "2",
         "--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1", "--against", "hf", "other", "--json",
         "--threads", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {
        "model": "tiny",
        "batch": 2,
        "prompt_tokens": 16,
        "new_tokens": 4,
        "threads": 1,
    }.items() <= report.items()
    assert report["invariant"] is True
    rates = ("ours_tok_s", "hf_tok_s", "other_tok_s", "ratio_hf", "ratio_other")
    assert min(report[key] for key in (*rates, "prefill_tok_s", "step_ms")) > 0
    assert set(report["spread"]) == set(rates)


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs"])
def test_each_step_of_the_schedule_load_ends_one_sequence_and_admits_one(policy):
    load = schedule.SteadyLoad(policy, batch=5, num_waiting=12)
    for _ in range(30):
        before = {request.id for request in load.scheduler.waiting()}
        assert load.step() > 0
        after = {request.id for request in load.scheduler.waiting()}
        assert (len(before), len(before - after), len(after - before)) == (12, 1, 1)
        assert load.scheduler.num_running == 4  # the fifth has just ended


def test_the_schedule_benchmark_reports_each_policy_and_queue_length(capsys):
    arguments = ["bench", "schedule", "--batch", "3", "--waiting", "20", "5", "--steps", "4", "--repeats", "1"]
    assert cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["ms_per_step"]) == set(report["growth"]) == {"fcfs", "edf", "lrs"}
    for times in report["ms_per_step"].values():
        assert set(times) == {"5", "20"} and min(times.values()) > 0
    assert cli.main([*arguments, "--policies", "lrs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line.split() for line in lines if line.startswith("  lrs") and ":" in line]
    assert line[1] == "5:" and line[3] == "20:"


# -- pause -----------------------------------------------------------------------------------------


def test_percentiles_are_values_that_were_measured():
    values = [float(value) for value in range(1, 201)][::-1]
    assert [pause.percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 100.0, 198.0, 200.0]
    assert pause.percentile([7.0], 99) == 7.0


def test_the_pause_report_is_in_milliseconds_and_holds_what_the_bars_compare():
    latencies = {"in_place": [0.01, 0.03], "retract": [0.02, 0.02], "abort": [0.04, 0.01]}
    resumes = [pause.Resume(1.0, 2.0, 5), pause.Resume(3.0, 2.0, 6), pause.Resume(2.2, 2.0, 7)]
    assert pause.report([0.01, 0.02, 0.05], latencies, resumes) == {
        "step_ms_p50": 20.0,
        "in_place_ms_p50": 10.0,
        "in_place_ms_p99": 30.0,
        "retract_ms_p50": 20.0,
        "retract_ms_p99": 20.0,
        "abort_ms_p50": 10.0,
        "abort_ms_p99": 40.0,
        "worst_p99_over_step": 2.0,
        "resume_ms": 2200.0,
        "ideal_prefill_ms": 2000.0,
        "resume_over_ideal": 1.1,
        "resumed_tokens": 7,
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_resuming_and_its_ideal_compute_the_same_rows_from_an_empty_cache(tiny, overlap):
    load = Load(batch=3, prompt_tokens=20, new_tokens=40)
    bench = pause.PauseBench(pause.make_engine(tiny, load, overlap=overlap), load, seed=0)
    metrics, rows = bench.engine.metrics, []
    with bench.engine.model.rollout_phase():
        measured = bench._until_decoding

        def counted() -> float:
            before = metrics.num_rows
            seconds = measured()
            rows.append(metrics.num_rows - before)
            return seconds

        bench._until_decoding = counted
        resume = bench.resume(repeat=0)
    filled, resumed, prefilled = rows
    assert resume.num_tokens > load.batch * load.prompt_tokens + 3 * 10
    assert resumed == prefilled > resume.num_tokens > filled
    assert min(resume.resume_seconds, resume.ideal_seconds) > 0
    assert metrics.num_cached_tokens == 0
    bench.engine.close()


@pytest.mark.slow
def test_the_pause_command_prints_the_agreed_keys():
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.integration.cli", "bench", "pause", "--model", "tiny", "--batch", "2",
         "--prompt-tokens", "16", "--new-tokens", "64", "--pauses", "2", "--repeats", "1", "--json", "--threads", "1"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    keys = ("step_ms_p50", "in_place_ms_p99", "retract_ms_p99", "abort_ms_p99", "resume_ms", "ideal_prefill_ms")
    assert min(report[key] for key in keys) > 0
    assert (report["batch"], report["pauses"], report["model"]) == (2, 2, "tiny")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_load_runs_on_a_gpu():
    model = presets.load_model("tiny", device="cuda")
    engine = runs.make_engine(model, LOAD, invariant=True)
    assert runs.run_engine(engine, LOAD, LOAD.prompts(16384, 0), 0).seconds > 0
    assert runs.run_transformers(model, LOAD, LOAD.prompts(16384, 0), 0).seconds > 0


@pytest.mark.slow
def test_overlap_bench_reports_every_variant():
    report = overlap.run(overlap_options("--batch", "2", "--new-tokens", "30", "--repeats", "1", "--work-ms", "4"))
    assert report["plain_ms"] > 0 and report["plain_work_ms"] >= 4, "a step sleeps as long as it is told to"
    assert report["plain_growth_ms"] == pytest.approx(report["plain_work_ms"] - report["plain_ms"], abs=2e-3)
    assert {"overlap_ms", "overlap_work_ms", "overlap_growth_ms", "traced_ms", "trace_cost"} <= set(report)


def overlap_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    overlap.add_arguments(parser)
    return parser.parse_args(arguments)
