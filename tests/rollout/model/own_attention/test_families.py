"""Families that call attention in ways of their own: transformers' tokens and gradients, the trainer's bits.

Layers that do not hand keywords on to their attention, are left out on text, or call it several times in a forward, and
attention of a class's own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.kernels.attention.paged import PagedStep
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.layer_probe import KVShape, LayerProbe
from lockstep.rollout.model.recurrent.states import StateShape
from lockstep.rollout.model.steps.context import StepContext
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.random_models import spread_weights

SIZES = {
    "vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GPTJ = {
    "vocab_size": 250, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FALCON = {**SIZES, "num_key_value_heads": None, "num_kv_heads": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 249, "bos_token_id": 248, "eos_token_id": 247}
FAMILIES: dict[str, dict[str, object]] = {  # model type -> settings
    "nemotron": SIZES,
    "stablelm": {**SIZES, "qk_layernorm": True, "use_parallel_residual": True},
    "gptj": {**GPTJ, "rotary_dim": 8},
    "codegen": {**GPTJ, "rotary_dim": 16},
    "gpt_neo": {
        **{"vocab_size": 250, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "max_position_embeddings": 256},
        **{"attention_types": [[["global", "local", "local"], 1]], "window_size": 20, "bos_token_id": None},
        **{"eos_token_id": None, "attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0},
    },
    "falcon": {**FALCON, "multi_query": True},
    "mllama": {
        "text_config": {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], **SPECIAL},
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1},
            **{"attention_heads": 2, "vision_output_dim": 64, "image_size": 28, "intermediate_layers_indices": [0]},
        },
    },
    "bloom": {
        **{"vocab_size": 250, "hidden_size": 60, "n_layer": 3, "n_head": 6, "seq_length": 256, "bos_token_id": None},
        **{"eos_token_id": None, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    },
    "mpt": {
        **{"vocab_size": 250, "d_model": 60, "n_layers": 3, "n_heads": 6, "max_seq_len": 256, "resid_pdrop": 0.0},
        **{"emb_pdrop": 0.0, "attn_config": {"attn_pdrop": 0, "softmax_scale": 0.3, "clip_qkv": 2.0}},
    },
    "diffllama": {**SIZES, "num_attention_heads": 4},
    "hrm_text": {**SIZES, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2, "head_dim": 16},
    "rembert": {**SIZES, **BERT, "num_key_value_heads": 4},
    "megatron-bert": {**SIZES, **BERT, "num_key_value_heads": 4},
}
DTYPES = [torch.float32, torch.bfloat16]
QUICK = [("nemotron", torch.bfloat16), ("gptj", torch.float32), ("gpt_neo", torch.bfloat16), ("falcon", torch.float32)]
QUICK += [("bloom", torch.float32), ("mpt", torch.bfloat16), ("mllama", torch.float32), ("diffllama", torch.bfloat16)]
ALL = list(itertools.product(FAMILIES, DTYPES))
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]
EVERY_FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in dict(QUICK) else pytest.mark.slow) for one in FAMILIES]
)
STEM = [(11 * i + 3) % 240 for i in range(40)]
PROMPTS = [[3, 17, 90, 4, 55], [*STEM, *range(40, 60)], [240], [*STEM, 7, 8, 9]]
TEMPERATURE = 0.7
WAYS: dict[str, dict[str, object]] = {
    "chunk 1": {"chunked_prefill_size": 1}, "chunk 13": {"chunked_prefill_size": 13}, "overlap": {"overlap": True},
    "no records": {"cuda_graph_batch_sizes": ()}, "no cache": {"prefix_cache": False},
    "no drafts": {"speculation": "off"},
    "drafts": {"speculation": {"siblings": 4, "past": 4, "history": 4}},
    "little memory": {"kv_cache": "9 blocks", "admission_ratio": 0, "chunked_prefill_size": 13},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def make(family: str, dtype: torch.dtype = torch.float32, **others: object) -> PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.CONFIG_MAPPING[family](**{**FAMILIES[family], **others})
    kind = transformers.AutoModelForImageTextToText if family == "mllama" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=dtype)
    return spread_weights(model).train()


def make_engine(model: PreTrainedModel, **config: object) -> Engine:
    return Engine(model, EngineConfig(**{"kv_cache": "64 blocks", "max_num_seqs": 4, **config}))


def settings() -> list[SamplingParams]:
    """Return how each prompt is sampled."""
    return [SamplingParams(max_new_tokens=12, temperature=TEMPERATURE, sampling_seed=i) for i in range(len(PROMPTS))]


def generate(engine: Engine) -> list[Completion]:
    answers = engine.generate(PROMPTS, settings())
    engine.check_integrity()
    return answers


def record(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs) for c in completions]


def trainers_logits(model: PreTrainedModel, completions: Sequence[Completion]) -> list[list[Tensor]]:
    """Compute the logits of each sequence alone, of all padded, and of all packed in a row."""
    sequences = [torch.tensor(c.prompt_ids + c.token_ids) for c in completions]
    lengths = [len(ids) for ids in sequences]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    alone = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    in_batch = model(padded, attention_mask=mask.long(), use_cache=False).logits
    packed = model(
        torch.cat(sequences)[None], position_ids=positions[None], cu_seq_lens_q=starts, cu_seq_lens_k=starts,
        use_cache=False,
    ).logits[0]  # fmt: skip
    return [alone, [row[:length] for row, length in zip(in_batch, lengths, strict=True)], list(packed.split(lengths))]


def assert_trainers_bits(engine: Engine, model: PreTrainedModel, completions: Sequence[Completion]) -> None:
    with engine.model.training_numerics():
        forms = trainers_logits(model, completions)
    for form in forms:
        for logits, completion in zip(form, completions, strict=True):
            assert logits.requires_grad
            chosen = logits[completion.num_prompt_tokens - 1 : -1]
            logprobs = selected_logprobs(chosen, torch.tensor(completion.token_ids), TEMPERATURE)
            assert list(completion.logprobs) == logprobs.tolist()


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_every_way_of_running_gives_the_trainers_bits(family, dtype):
    model = make(family, dtype)
    engine = make_engine(model)
    expected = generate(engine)
    assert_trainers_bits(engine, model, expected)
    hits = generate(engine)
    assert [c.num_cached_tokens for c in hits] == [0, 48, 0, 32]
    assert record(hits) == record(expected)
    for config in WAYS.values():
        assert record(generate(make_engine(model, **config))) == record(expected)


@EVERY_FAMILY
def test_greedy_tokens_and_their_log_probabilities_are_transformers(family):
    model = make(family).eval()
    found = make_engine(model).generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0.0))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=12,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = model(expected, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = selected_logprobs(logits, expected[0, len(prompt) :])
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-4, rtol=1e-4)


def gradients(model: PreTrainedModel, packed: bool) -> dict[str, Tensor]:
    """Return the gradients of a sum over two sequences, packed in a row or in a batch."""
    model.zero_grad()
    ids = (torch.arange(60) * 7 % 240).view(2, 30)
    if packed:
        starts = torch.tensor([0, 30, 60], dtype=torch.int32)
        positions = torch.arange(30).repeat(2)[None]
        logits = model(ids.view(1, 60), position_ids=positions, cu_seq_lens_q=starts, use_cache=False).logits
    else:
        logits = model(ids, use_cache=False).logits
    logits.view(60, -1)[:, ::7].float().log_softmax(-1).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@EVERY_FAMILY
def test_gradients_are_those_of_the_own_attention_also_with_checkpoints_and_packed(family):
    model = make(family)
    engine, own = make_engine(model), gradients(model, packed=False)
    with engine.model.training_numerics():
        found, packed = gradients(model, packed=False), gradients(model, packed=True)
    assert found.keys() == own.keys()
    largest = max(float(grad.abs().max()) for grad in own.values())
    for name, grad in found.items():
        torch.testing.assert_close(grad, own[name], atol=1e-4 * largest, rtol=1e-3)
        torch.testing.assert_close(packed[name], own[name], atol=1e-4 * largest, rtol=1e-3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with engine.model.training_numerics():
        for is_packed, expected in ((False, found), (True, packed)):
            again = gradients(model, packed=is_packed)
            assert all(torch.equal(grad, expected[name]) for name, grad in again.items())


@EVERY_FAMILY
def test_a_folder_is_loaded_with_the_same_bits(family, tmp_path):
    model = make(family)
    expected = record(generate(make_engine(model)))
    model.save_pretrained(tmp_path)
    assert record(generate(make_engine(str(tmp_path)))) == expected


@EVERY_FAMILY
def test_decode_steps_are_recorded(family):
    engine = make_engine(make(family), speculation="off")
    with engine.model.rollout_phase():
        engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=30, temperature=TEMPERATURE))
    assert [step.is_trusted for step in engine.parts.runner._graphs._records.values()] == [True]


@EVERY_FAMILY
def test_packed_positions_without_offsets_are_refused(family):
    model = make(family)
    engine = make_engine(model)
    positions = torch.arange(10).repeat(2)[None]
    with engine.model.training_numerics(), pytest.raises(ValueError, match="pass cu_seq_lens_q"):
        model(positions + 20, position_ids=positions, use_cache=False)


def test_each_call_of_a_layer_has_kv_of_its_own(monkeypatch):
    for family, num_calls in (("diffllama", 3 * 2), ("hrm_text", 2 * 2 * 3)):
        assert len(make_engine(make(family)).model.kv_shapes) == num_calls
    kind = type(make("diffllama").model.layers[0].self_attn)
    own = kind.forward

    def twice_in_the_first(self, *args, **named):
        if self.layer_idx == 0:
            own(self, *args, **named)
        return own(self, *args, **named)

    monkeypatch.setattr(kind, "forward", twice_in_the_first)
    model = make("diffllama")
    engine = make_engine(model)
    assert len(engine.model.kv_shapes) == 3 * 2 + 2
    assert_trainers_bits(engine, model, generate(engine))


def test_layers_that_have_states_call_their_attention_once():
    probe = LayerProbe(512)
    for layer in (0, 1, 1):
        probe.attention_called(nn.Identity(), layer, KVShape(2, 8, 8, torch.float32), None, None, None)
    assert probe.places(range(2)) == {(0, 0): 0, (1, 0): 1, (1, 1): 2}
    probe.states[1] = {"conv": StateShape((4, 3), torch.float32)}
    with pytest.raises(ValueError, match=r"layers \[1\] call their attention 2 times in a forward"):
        probe.refuse_faults(range(2), "Looped")


def test_a_call_of_a_layer_that_was_not_there_at_the_start_is_refused():
    keys, values = ([torch.full((1, 1, 1, 1), 10 * kind + place) for place in range(3)] for kind in range(2))
    table, starts, lengths = (torch.tensor(one, dtype=torch.int32) for one in ([[0]], [0, 1], [1]))
    rows = PagedStep(table, starts, lengths)
    step = StepContext(torch.zeros(1), rows, keys, values).begun({(0, 0): 0, (1, 0): 1, (1, 1): 2})
    found = [step.of_layer(layer, None) for layer in (1, 0, 1)]
    assert [(int(one.keys), int(one.values)) for one in found] == [(1, 11), (0, 10), (2, 12)]
    with pytest.raises(ValueError, match="layer 1 calls its attention more often than when its module was hosted"):
        step.of_layer(1, None)


def test_layers_that_text_leaves_out_have_no_kv_and_images_are_refused():
    model = make("mllama")
    engine = make_engine(model)
    assert [shape.num_kv_heads for shape in engine.model.kv_shapes] == [2, 0, 2, 0]
    ids, image = torch.arange(5)[None], torch.randn(1, 7, 64)
    assert model.config.text_config.cross_attention_layers == [1, 3]
    with engine.model.training_numerics(), pytest.raises(ValueError, match="brought 7 keys for 5 queries"):
        model(ids, cross_attention_states=image, use_cache=False)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("stablelm", "StableLm"),
        ("gptj", "GPTJ"),
        ("gpt_neo", "GPTNeo"),
        ("falcon", "Falcon"),
        ("diffllama", "DiffLlama"),
    ],
)
def test_families_without_a_plan_are_not_divided(family, name):
    with pytest.raises(ValueError, match=f"{name}ForCausalLM brings no tensor-parallel plan"):
        make_engine(make(family), k_blocks=2)


@pytest.mark.parametrize(
    "options",
    [
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
    ],
    ids=["40b", "heads"],
)
def test_other_forms_of_falcon_give_the_trainers_bits(options):
    model = make("falcon", **options)
    engine = make_engine(model, chunked_prefill_size=13)
    assert_trainers_bits(engine, model, generate(engine))


def test_families_whose_own_attention_computes_something_else_are_refused_by_name():
    with pytest.raises(ValueError, match=r"FalconAttention adds a tensor .* to scores"):
        make_engine(make("falcon", alibi=True))  # its eager code adds the numbers of keys twice
    bloom = make("bloom")
    del bloom.config.seq_length
    with pytest.raises(ValueError, match="a configuration without max_position_embeddings"):
        make_engine(bloom)
    bloom.config.max_position_embeddings = 100
    assert make_engine(bloom).model.max_model_len == 100


def test_a_trainers_row_may_be_longer_than_contexts_where_keys_are_numbered():
    model = make("bloom", seq_length=32)
    engine, ids = make_engine(model), torch.arange(100)[None] * 7 % 240
    own = model(ids, use_cache=False).logits
    with engine.model.training_numerics():
        torch.testing.assert_close(model(ids, use_cache=False).logits, own, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nemotron", "hrm_text"])
def test_ranks_that_share_layers_give_the_bits_of_one(run_world, family):
    model = make(family)
    common = {"chunked_prefill_size": 13, "k_blocks": 2}
    wanted = record(generate(make_engine(model, **common)))

    def rank(_: int) -> object:
        engine = make_engine(model, tp=2, **common)
        found = record(engine.generate(PROMPTS if engine.is_controller else None, settings()))
        engine.close()
        return found

    assert run_world(2, rank) == [wanted] * 2
