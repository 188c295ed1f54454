"""One sequence in two ways: equal ones in every operation, and others from the first operation on that differs."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.integration.explain.comparison import Explanation, compare
from lockstep.integration.explain.recording import Operation, Recording
from lockstep.integration.explain.runs import run_way
from lockstep.integration.explain.sequence import TokenSequence
from lockstep.integration.explain.ways import parse_way, with_equal_blocks
from lockstep.tests.support import prepared_python
from lockstep.tests.support.random_models import random_model

INVARIANT = ["prefill", "chunked", "prefix-hit", "speculation", "decode,mates=3", "trainer", "trainer,mates=2"]
NUM_OPERATIONS = 72  # of two layers of Qwen 3


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3")


@pytest.fixture(scope="module")
def sequence() -> TokenSequence:
    ids = torch.randint(256, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    return TokenSequence(tuple(ids[:33]), tuple(ids[33:]))


@pytest.fixture(scope="module")
def decoded(model, sequence) -> Recording:
    return run_way(parse_way("decode"), sequence, model)


def explained(first: Recording, text: str, sequence: TokenSequence, model) -> Explanation:
    return compare(first, run_way(parse_way(text), sequence, model))


def test_a_recording_has_every_operation_at_every_position(decoded, sequence):
    assert len(decoded.operations) == NUM_OPERATIONS
    for operation, rows in decoded.operations.items():
        first = len(sequence.prompt_ids) - 1 if operation.name == "lm_head" else 0
        assert rows.by_position()[0] == list(range(first, sequence.num_rows)), operation
    assert list(decoded.logprobs) == list(range(len(sequence.prompt_ids), len(sequence.ids)))


@pytest.mark.parametrize("way", INVARIANT)
def test_invariant_ways_agree_in_every_operation(way, decoded, sequence, model):
    explanation = explained(decoded, way, sequence, model)
    assert explanation.first is None
    assert len(explanation.gaps) == NUM_OPERATIONS + 1  # and the log-probability
    assert explanation.only == ((), ())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_operations_part_at_a_norm_or_a_product(attention, decoded, sequence, model):
    explanation = explained(decoded, f"transformers,attention={attention}", sequence, model)
    assert explanation.first is not None
    assert explanation.first.operation.layer == 0
    assert explanation.first.operation.name in ("input_layernorm", "self_attn.q_proj")
    assert explanation.first.ulps < 100
    assert max(gap.max_difference for gap in explanation.gaps) < 1e-3


def test_transformers_attentions_part_at_the_attention_itself(sequence, model):
    eager = run_way(parse_way("transformers"), sequence, model)
    explanation = explained(eager, "transformers,attention=sdpa", sequence, model)
    assert explanation.first is not None
    assert explanation.first.operation == Operation(0, "self_attn", "attention")
    assert len(explanation.first.index) == 2  # head and channel


def test_other_numbers_of_k_blocks_part_at_the_first_sum_over_blocks(decoded, sequence, model):
    explanation = explained(decoded, "decode,k_blocks=2", sequence, model)
    assert explanation.first is not None
    assert explanation.first.operation == Operation(0, "self_attn.o_proj")


def test_dtypes_are_compared_in_the_coarser_one(decoded, sequence, model, tmp_path):
    model.save_pretrained(tmp_path)
    explanation = explained(decoded, "bf16", sequence, Path(tmp_path))
    assert explanation.dtype == "bfloat16"
    assert explanation.first is not None
    # The weights are rounded, so the first product that rounds its own result differs by a step of bfloat16.
    assert explanation.first.operation.layer == 0
    assert explanation.first.ulps == 1


def test_small_distances_can_be_passed_over(decoded, sequence, model):
    other = run_way(parse_way("transformers"), sequence, model)
    nearest = compare(decoded, other)
    farther = compare(decoded, other, at_least=50)
    assert nearest.first is not None
    assert farther.first is not None
    assert farther.first.ulps >= 50 > nearest.first.ulps


def test_an_engine_without_invariant_mode_is_recorded(decoded, sequence, model):
    explanation = explained(decoded, "no-invariant", sequence, model)
    assert explanation.first is not None  # library products round otherwise


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "qwen3_5", "gpt_oss", "mistral"])
def test_other_families_agree_between_decode_and_trainer(family, sequence):
    model = random_model(family)
    recordings = [run_way(parse_way(way), sequence, model) for way in ("decode", "trainer,mates=1")]
    explanation = compare(*recordings)
    assert explanation.first is None
    assert len(explanation.gaps) > NUM_OPERATIONS // 2


def test_recordings_come_back_from_a_file(decoded, tmp_path):
    decoded.save(tmp_path / "one")
    again = Recording.load(tmp_path / "one")
    assert list(again.operations) == list(decoded.operations)
    assert again.logprobs == decoded.logprobs
    assert compare(decoded, again).first is None


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp=2,pp=2,chunk=16", marks=pytest.mark.slow),
        pytest.param("tp=2", marks=pytest.mark.exhaustive),
        pytest.param("pp=2", marks=pytest.mark.exhaustive),
    ],
)
def test_layouts_agree_and_a_changed_weight_is_found_in_one(layout, sequence, model, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", prepared_python.PopenOfProduct)  # of the launchers of ranks
    model.save_pretrained(tmp_path / "model")
    whole, divided = with_equal_blocks(parse_way("decode"), parse_way(layout))
    recordings = [run_way(way, sequence, tmp_path / "model") for way in (whole, divided)]
    explanation = compare(*recordings)
    assert explanation.first is None
    assert len(explanation.gaps) == NUM_OPERATIONS + 1
    weight = model.model.layers[1].self_attn.k_proj.weight
    kept = weight.data.clone()
    with torch.no_grad():
        weight[40, 7] *= 1.5
    model.save_pretrained(tmp_path / "changed")
    weight.data.copy_(kept)
    changed = replace(divided, model=str(tmp_path / "changed"))
    found = compare(recordings[0], run_way(changed, sequence, tmp_path / "model"))
    assert found.first is not None
    assert found.first.operation == Operation(1, "self_attn.k_proj")
    assert found.first.index == (40,)


@pytest.mark.slow
def test_a_new_interpreter_has_all_that_a_rank_imports():
    subprocess.run([sys.executable, "-c", "import lockstep.integration.explain.rank"], check=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deocde", "'deocde' is none of decode"),
        ("", "is empty"),
        ("decode,chunk=x", "'chunk=x' is no whole number"),
        ("trainer,tp=2,chunk=4", "trainer has no chunk, tp"),
        ("prefill,draft=2", "prefill has no draft"),
        ("prefix=5", "multiple of 16"),
        ("dtype=float16", "dtype must be"),
        ("transformers,mates=1", "no mates"),
        ("tp=0", "tp must be at least 1"),
    ],
)
def test_wrong_ways_are_refused_by_name(text, said):
    with pytest.raises(ValueError, match="the way") as refusal:
        parse_way(text)
    assert said in str(refusal.value)


@pytest.mark.parametrize("text", ["decode", "prefill,chunk=16", "decode,tp=2,pp=2", "trainer,mates=2,dtype=bfloat16"])
def test_a_way_is_described_as_it_is_written(text):
    assert parse_way(text).describe() == text
    assert parse_way(parse_way(text).describe()) == parse_way(text)


def test_a_prefix_as_long_as_the_sequence_is_refused(sequence, model):
    with pytest.raises(ValueError, match="leaves nothing"):
        run_way(parse_way("prefix=64"), sequence, model)
