"""Samples that begin alike have rows in common in training: equal log-probabilities, gradients but for rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.grpo.training.microbatches import Microbatch, microbatches, rows_of, whole
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.grpo.training.shared_prefixes import RowTree, why_no_shared_prefixes
from lockstep.integration.grpo.training.trainer import GrpoTrainer
from lockstep.integration.ranks import Ranks, process_group
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.sampling_params import SamplingParams

CPU = torch.device("cpu")
RANKS = Ranks(0, 1, CPU)
SETTINGS = TrainSettings(learning_rate=1e-3, num_warmup_steps=0)
A = Sample((1, 2, 3), (4, 5), (-0.1, -0.2), 1.0)
B = Sample((1, 2, 3), (4, 6, 7), (-0.1, -0.4, -0.5), -2.0)
C = Sample((1, 2, 3), (4, 5), (-0.1, -0.2), -1.0)  # the tokens of A
D = Sample((1, 9), (8,), (-0.3,), 1.0)


@pytest.fixture
def group():
    with process_group(RANKS, 30):
        yield


# -- rows ----------------------------------------------------------------------------------------------------------


def test_rows_of_what_samples_have_in_common_are_there_once():
    batch = pack([A, B, C, D], CPU, shares=True)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 1]]
    assert batch.logit_rows.tolist() == [2, 3, 2, 3, 4, 2, 3, 5] and batch.targets.tolist() == [4, 5, 4, 6, 7, 4, 5, 8]
    shared = batch.packing["lockstep_shared_rows"]
    assert shared.row_of.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 5]
    assert shared.starts.tolist() == [0, 4, 9, 13, 15] and batch.num_rows == 6


def test_samples_with_nothing_in_common_are_packed_as_before():
    one, two = (pack([A, replace(D, prompt_ids=(7, 9))], CPU, shares=shares) for shares in (False, True))
    assert one.input_ids.tolist() == two.input_ids.tolist() == [[1, 2, 3, 4, 7, 9]]
    assert list(two.packing) == ["cu_seq_lens_q"] and two.packing["cu_seq_lens_q"].tolist() == [0, 4, 6]


def test_a_tree_tells_how_many_rows_a_sequence_adds():
    tree, plain = RowTree(shares=True), RowTree(shares=False)
    for one in (tree, plain):
        one.add([1, 2, 3])
    assert [tree.num_new(ids) for ids in ([1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 3, 3], [2])] == [0, 0, 1, 2, 1]
    assert plain.num_new([1, 2, 3]) == 3


def test_micro_batches_are_full_of_rows_that_are_there_once():
    """A has 4 rows, B one more, C none, D one; of B and C the 3 and 2 logits count, which are more."""

    def divided(limit, *, shares):
        return list(microbatches([A, B, C, D], limit, rows_of, lambda _: True, shares=shares))

    assert divided(10, shares=True) == [Microbatch([A, B, C, D], True, is_last=True)]
    assert divided(9, shares=True) == [Microbatch([A, B, C], True), Microbatch([D], True, is_last=True)]
    assert divided(9, shares=False) == [Microbatch([A, B], True), Microbatch([C, D], True, is_last=True)]
    # Recurrent layers keep something for each row of each sample.
    parts = list(microbatches([A, B, C, D], 9, whole(rows_of), lambda _: True, shares=True))
    assert [part.samples for part in parts] == [[A, B], [C, D]]


# -- models --------------------------------------------------------------------------------------------------------


def random_samples(vocab_size: int) -> list[Sample]:
    """Make two groups with long prompts and answers of several lengths, two of which are equal."""
    draw = torch.Generator().manual_seed(5)

    def ids(num):
        return tuple(torch.randint(vocab_size, (num,), generator=draw).tolist())

    samples = []
    for length in (41, 7):
        prompt, twin = ids(length), ids(9)
        answers = [ids(1), twin, ids(20), (*twin[:5], *ids(3)), twin]
        samples += [Sample(prompt, answer, (-1.0,) * len(answer), 1.0) for answer in answers]
    return samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "mistral", "gemma2", "gemma3", "olmo2", "gpt_oss", "qwen3_moe", "llama4"),
        *("qwen3_5", "qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1", "mamba", "mamba2", "zamba", "minimax"),
        *("jamba", "lfm2", "inkling"),
    ],
)
def test_logits_have_the_same_bits_as_without(make_model, family, dtype):
    hosted = HostedModel.adopt(make_model(family, dtype), dtype=None, device=None, invariant=True)
    assert why_no_shared_prefixes(hosted) is None
    assert not hosted.module.training, "as it was"
    samples = random_samples(hosted.vocab_size)
    found = []
    for shares in (True, False):
        batch = pack(samples, CPU, shares=shares)
        with torch.no_grad(), hosted.training_numerics():
            found.append(batch.kept(hosted.module(**batch.model_inputs()).logits))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("zaya", "has states of its own kind: its sequences cannot share rows"),
        ("deepseek_v32", "selects keys, or sees images both ways: its rows cannot be shared"),
    ],
)
def test_models_whose_layers_cannot_are_told_by_name_and_train_without(group, make_model, caplog, family, why):
    caplog.set_level("INFO")
    run = Run(make_model(family), SETTINGS)
    assert why in why_no_shared_prefixes(run.engine.model)
    assert f"samples share no rows in training: {why_no_shared_prefixes(run.engine.model)}" in caplog.text
    stats = run.trainer.update(run.samples(), 0)
    assert (stats.logprob_gap, stats.num_shared) == (0.0, 0)


# -- training ------------------------------------------------------------------------------------------------------


class Run:
    """A trainer of a small model, with an engine that draws the samples."""

    def __init__(self, model, settings: TrainSettings) -> None:
        self.model, self.engine = model, Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
        service = RolloutService(self.engine)
        self.trainer = GrpoTrainer(
            self.engine.model, DdpBackend(settings, RANKS), settings, 1.0, RANKS, max_new_tokens=9,
            announce_step=service.optimizer_step,
        )  # fmt: skip

    def samples(self) -> list[Sample]:
        params = [SamplingParams(n=4, max_new_tokens=9, sampling_seed=seed, ignore_eos=True) for seed in (2, 3)]
        completions = self.engine.generate([[5, 6, 7] * 20, [9, 10]], params)
        advantages = (1.0, -1.0, 0.5, 0.0, 0.25, -0.5, 1.0, -1.0)
        return [Sample(c.prompt_ids, c.token_ids, c.logprobs, a) for c, a in zip(completions, advantages, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_checkpointing": True}, {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
     {"gradient_accumulation_steps": 2}, {"microbatch_bytes": "1GiB", "epochs_per_step": 2}],
    ids=str,
)  # fmt: skip
def test_an_update_has_gap_0_less_rows_and_the_gradient_of_one_without(group, make_model, changes, dtype):
    settings = replace(SETTINGS, **changes)
    run, without = (
        Run(make_model("qwen3", dtype), settings),
        Run(make_model("qwen3", dtype), replace(settings, share_prefixes=False)),
    )
    samples = run.samples()
    stats, expected = run.trainer.update(samples, 0), without.trainer.update(samples, 0)
    assert stats.logprob_gap == expected.logprob_gap == 0.0
    assert stats.num_rows + stats.num_shared == expected.num_rows == sum(sample.num_rows for sample in samples)
    assert expected.num_shared == 0 and stats.num_shared > 60
    # The second pass has other weights, by rounding.
    assert stats.loss == pytest.approx(expected.loss, abs=1e-6 if "epochs_per_step" not in changes else 1e-3)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4 if dtype == torch.float32 else 2e-2)


def test_updates_repeat_bit_for_bit(group, make_model):
    runs = [Run(make_model("qwen3"), SETTINGS) for _ in range(2)]
    samples = runs[0].samples()
    stats = [run.trainer.update(samples, 0) for run in runs]
    assert stats[0] == stats[1]
    assert all(map(torch.equal, runs[0].model.parameters(), runs[1].model.parameters()))


def test_a_reference_whose_layers_cannot_share_rows_keeps_the_policy_from_it(group, make_model, caplog):
    caplog.set_level("INFO")
    hosted = Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks")).model
    settings = replace(SETTINGS, kl_coefficient=0.1)
    GrpoTrainer(hosted, DdpBackend(settings, RANKS), settings, 1.0, RANKS, reference=make_model("zaya"))
    assert "samples share no rows in training: ZayaCCA" in caplog.text
