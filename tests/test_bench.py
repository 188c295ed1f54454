"""The benchmarks, on loads so small that only their arithmetic is tested."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from lockstep.integration.bench import presets, rollout
from lockstep.integration.bench.rollout import Load, Run

LOAD = Load(batch=3, prompt_tokens=20, new_tokens=5)


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    """These models are too small to share out."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny():
    return presets.load_model("tiny", dtype="float32")


def test_presets_have_the_sizes_they_claim():
    for name, least, most in (("tiny", 7.0e6, 7.5e6), ("small", 94.5e6, 95.5e6)):
        with torch.device("meta"):
            model = presets.Qwen3ForCausalLM(
                presets.Qwen3Config(**presets.PRESETS[name], tie_word_embeddings=True)
            )
        assert least <= sum(parameter.numel() for parameter in model.parameters()) <= most


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
    engine = rollout.make_engine(tiny, LOAD, invariant=True)
    for repeat in range(2):
        run = rollout.run_engine(engine, LOAD, LOAD.prompts(16384, repeat))
        assert len(run.decode_step_seconds) == LOAD.new_tokens - 1
        assert run.prefill_seconds + sum(run.decode_step_seconds) <= run.seconds
    assert engine.metrics.num_cached_tokens == 0
    assert engine.metrics.num_output_tokens == 2 * LOAD.batch * LOAD.new_tokens


def test_transformers_runs_the_same_load_and_its_logprobs_are_those_of_its_tokens(tiny, monkeypatch):
    taken = {}

    class Spy(rollout.LogprobRecorder):
        def finish(self, sequences):
            taken["sequences"], taken["logprobs"] = sequences, super().finish(sequences)
            return taken["logprobs"]

    monkeypatch.setattr(rollout, "LogprobRecorder", Spy)
    rollout.run_transformers(tiny, LOAD, LOAD.prompts(16384, 0))
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
    assert rollout.report(load, ours, theirs) == {
        "tok_s": 100.0,
        "tok_s_range": [50.0, 200.0],
        "prefill_tok_s": 50.0,
        "step_ms": 20.0,
        "hf_tok_s": 50.0,
        "hf_tok_s_range": [25.0, 100.0],
        "ratio": 2.0,
        "ratio_range": [1.0, 4.0],
    }


def test_a_load_beyond_the_context_is_refused(tiny):
    with pytest.raises(ValueError, match=r"5000 tokens .* exceed the context of 4096"):
        rollout.make_engine(tiny, Load(1, 4000, 1000), invariant=True)


def test_the_command_prints_one_json_object_on_the_last_line():
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.integration.cli", "bench", "rollout", "--model", "tiny", "--batch", "2",
         "--prompt-tokens", "16", "--new-tokens", "4", "--repeats", "1", "--against", "hf", "--json", "--threads", "1"],
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
    assert min(report[key] for key in ("tok_s", "prefill_tok_s", "step_ms", "hf_tok_s", "ratio")) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_load_runs_on_a_gpu():
    model = presets.load_model("tiny", device="cuda")
    engine = rollout.make_engine(model, LOAD, invariant=True)
    assert rollout.run_engine(engine, LOAD, LOAD.prompts(16384, 0)).seconds > 0
    assert rollout.run_transformers(model, LOAD, LOAD.prompts(16384, 0)).seconds > 0
