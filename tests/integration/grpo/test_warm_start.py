import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.integration.grpo.job import GrpoJob
from lockstep.integration.grpo.settings.sections import ModelSettings
from lockstep.integration.grpo.tasks.arithmetic import (
    ArithmeticSpec,
    arithmetic_problems,
    build_tokenizer,
    worked_solution,
)
from lockstep.integration.grpo.tasks.warm_start import (
    ModelSpec,
    WarmStartSpec,
    build_model,
    train_supervised,
    warm_start,
    warm_start_key,
)

TINY = WarmStartSpec(
    model=ModelSpec(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1),
    data=ArithmeticSpec(min_digits=2, max_digits=3),
    num_steps=4,
    batch_size=6,
    num_warmup_steps=2,
)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_folder_loads_with_transformers_and_is_reused(tmp_path):
    losses = []
    folder = warm_start(TINY, tmp_path, on_progress=lambda progress: losses.append(progress.loss))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(losses) == 4
    assert warm_start(TINY, tmp_path, on_progress=lambda progress: losses.append(progress.loss)) == folder
    assert len(losses) == 4
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert json.loads((folder / "warm_start.json").read_text())["num_steps"] == 4


def test_training_is_a_function_of_the_spec_and_leaves_the_generator_alone(tmp_path):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = warm_start(TINY, tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert same_bits(weights(first), weights(warm_start(TINY, tmp_path / "b")))
    assert not same_bits(weights(first), weights(warm_start(replace(TINY, seed=1), tmp_path / "b")))


def test_whatever_determines_the_result_changes_the_key():
    variants = [
        (TINY, 1, "cpu", ""),
        (replace(TINY, slip_rate=0.5), 1, "cpu", ""),
        (replace(TINY, model=replace(TINY.model, num_layers=2)), 1, "cpu", ""),
        (replace(TINY, data=replace(TINY.data, seed=1)), 1, "cpu", ""),
        (TINY, 2, "cpu", ""),
        (TINY, 1, "cuda", ""),
        (TINY, 1, "cpu", "invariant"),
    ]
    assert len({warm_start_key(*variant) for variant in variants}) == len(variants)


def test_an_interrupted_warm_start_leaves_nothing_that_passes_for_a_result(tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(TINY, tmp_path, on_progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_failing_save_leaves_nothing_behind(tmp_path):
    def fill_disk(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    def prepare(model):
        model.save_pretrained = fill_disk

    with pytest.raises(OSError, match="disk full"):
        warm_start(TINY, tmp_path, prepare=prepare)
    assert not list(tmp_path.iterdir())


def test_prepare_sees_the_module_before_it_is_trained(tmp_path):
    num_forwards = []

    def prepare(model):
        model.register_forward_hook(lambda *_: num_forwards.append(1))

    warm_start(TINY, tmp_path, prepare=prepare, prepared_as="hooked")
    assert len(num_forwards) == TINY.num_steps


def test_it_learns(tmp_path):
    losses = []
    spec = replace(TINY, num_steps=30, batch_size=16, learning_rate=1e-2)
    warm_start(spec, tmp_path, on_progress=lambda progress: losses.append(progress.loss))
    assert losses[-1] < 0.7 * losses[0]


def test_the_loss_is_the_token_mean_over_completions_and_end_tokens():
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(TINY.model, tokenizer)
    spec = replace(TINY, num_steps=1, slip_rate=0.0)
    total, num_tokens = 0.0, 0
    with torch.no_grad():
        for problem in arithmetic_problems(spec.data).train_problems(-1, spec.batch_size):
            prompt = tokenizer(problem.prompt).input_ids
            completion = tokenizer(worked_solution(problem), add_special_tokens=False).input_ids
            ids = torch.tensor([prompt + completion + [tokenizer.eos_token_id]])
            logprobs = model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
            picked = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
            total -= picked.sum().item()
            num_tokens += len(picked)
    losses = []
    train_supervised(model, tokenizer, spec, lambda progress: losses.append(progress.loss))
    assert losses == [pytest.approx(total / num_tokens, rel=1e-5)]


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(tmp_path, run_world):
    def rank(rank):
        losses = []
        folder = warm_start(TINY, tmp_path / "two", on_progress=lambda progress: losses.append(progress.loss))
        return str(folder), losses

    results = run_world(2, rank)
    assert results[0] == results[1]
    losses = []
    alone = warm_start(TINY, tmp_path / "one", on_progress=lambda progress: losses.append(progress.loss))
    assert results[0][1] == pytest.approx(losses, rel=1e-4)
    pairs = [weights(results[0][0]), weights(alone)]
    for name in pairs[0]:
        torch.testing.assert_close(pairs[0][name], pairs[1][name], atol=2e-3, rtol=0)


def test_every_fault_of_a_spec_is_named():
    with pytest.raises(ValueError, match=r"hidden_size=48 .*num_layers=0 .*num_heads=3 is not a multiple"):
        ModelSpec(hidden_size=48, num_layers=0, num_heads=3)
    with pytest.raises(ValueError, match=r"num_steps.*slip_rate.*learning_rate.*max_grad_norm"):
        WarmStartSpec(num_steps=0, slip_rate=2.0, learning_rate=float("nan"), max_grad_norm=0.0)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_folder_of_a_job_is_one_line_with_a_remedy(tmp_path, name):
    """It was a traceback of each rank, or a line without the file."""
    tokenizer = build_tokenizer()
    model = build_model(TINY.model, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    job = object.__new__(GrpoJob)
    job.config, job.ranks = SimpleNamespace(model=ModelSettings()), SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=rf"model folder '{tmp_path}' cannot be loaded: .*; remove this folder, and it"
    ):
        job._loaded(tmp_path)
