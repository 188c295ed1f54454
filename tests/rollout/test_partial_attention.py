"""Families whose rows attend to a part of their keys, hosted bit for bit: to those that an indexer selects (DeepSeek
Sparse Attention), in chunks of positions (Llama 4), to a window and to entries of windows before it (DeepSeek-V4), or
to pools of tokens (GLM-5-Next, Qwen 4).

The models select 12 keys a row, 5 entries or 3 pools of 4 tokens, and chunks have 20 (random_models.py); the prompts
are longer.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.masking_utils import chunked_causal_mask_function

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.attention import chunk_of
from lockstep.rollout.model.layer_probe import KVShape, LayerProbe
from lockstep.rollout.model.operations.pools import pooled_indexer_forward
from lockstep.rollout.model.operations.row_positions import PACKING, RowCache
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.rollout.speculation.drafting import Case, Oracle, counts, draft_always, outputs_of, play
from lockstep.tests.support import random_models
from lockstep.tests.support.covering import covering

INDEXED = ["deepseek_v32", "glm_moe_dsa"]  # each layer has an indexer; the second shares the first one's selection
INDEXED += ["dots3_note_text"]  # whose keys are float32, and layers in a window have none
WITH_STATES = ["deepseek_v4", "glm5_next", "qwen4_exp"]  # a prefix hit needs a snapshot of what is pooled next
FAMILIES = [*INDEXED, "llama4", *WITH_STATES]
STEM = [(11 * i + 3) % 250 for i in range(40)]
PROMPTS = [[3, 17, 90, 4, 55], [*STEM, 1, 2, 3], [249], [*STEM, *((7 * i) % 250 for i in range(1, 51))]]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread(restore_threads):
    torch.set_num_threads(1)


def make_engine(model: PreTrainedModel, **config: object) -> Engine:
    settings = {"kv_cache": "64 blocks", "max_num_seqs": 4, "max_num_batched_tokens": 256, **config}
    return Engine(model.train(), EngineConfig(**settings))


def params(num_new: int = 20) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, temperature=0.7, sampling_seed=5)


def assert_trainers_bits(engine: Engine, completions: list[Completion]) -> None:
    for c in completions:
        ids = torch.tensor([c.prompt_ids + c.token_ids])
        with engine.model.training_numerics():
            logits = engine.model.module(ids, use_cache=False).logits[0, c.num_prompt_tokens - 1 : -1]
        assert logits.requires_grad
        assert list(c.logprobs) == selected_logprobs(logits, torch.tensor(c.token_ids), 0.7).tolist()


def record(completions: list[Completion]) -> list[tuple]:
    return [(c.token_ids, c.logprobs) for c in completions]


@covering(1, in_slow=2, family=FAMILIES, dtype=DTYPES, chunk=[1, 13, 100])
def test_chunks_neighbours_and_prefix_hits_keep_the_trainers_bits(make_model, family, dtype, chunk):
    engine = make_engine(make_model(family, dtype), chunked_prefill_size=chunk)
    cold = engine.generate(PROMPTS, params())
    assert_trainers_bits(engine, cold)
    hit = engine.generate(PROMPTS, params())
    cached = [c.num_cached_tokens for c in hit]
    is_hit = cached[3] > 0 if family in WITH_STATES else cached == [0, 32, 0, 80]  # as far as states are kept
    assert is_hit and record(hit) == record(cold)
    engine.flush_cache()
    assert record([engine.generate(p, params())[0] for p in PROMPTS[::-1]][::-1]) == record(cold)


@pytest.mark.parametrize("rates", [(2, 2), (8, 128)])  # the last one is that of published models
def test_windows_of_any_length_are_pooled(make_model, rates):
    kinds = ("compressed_sparse_attention", "heavily_compressed_attention")
    engine = make_engine(make_model("deepseek_v4", compress_rates=dict(zip(kinds, rates, strict=True))))
    prompts = [PROMPTS[3], [(13 * i + 1) % 250 for i in range(280)], PROMPTS[2]]
    cold = engine.generate(prompts, params())
    assert_trainers_bits(engine, cold)
    hit = engine.generate(prompts[::-1], params())[::-1]
    assert record(hit) == record(cold) and hit[1].num_cached_tokens > 0


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        ("glm_moe_dsa", {"index_topk": 512}),
        ("dots3_note_text", {"index_topk": 512}),
        ("deepseek_v4", {"index_topk": 512}),
        ("glm5_next", {"index_topk": 512}),
        ("qwen4_exp", {"indexer_budget": 512}),
        ("qwen4_exp", {"ple_layer_ids": [3]}),
        ("deepseek_v4", {"sliding_window": 11}),
        ("llama4", {"attention_chunk_size": 512}),
        ("llama4", {"attn_temperature_tuning": False}),
    ],
)
def test_the_part_matters(make_model, family, plain):
    found = make_engine(make_model(family)).generate(PROMPTS, params(12))
    every = make_engine(make_model(family, **plain)).generate(PROMPTS, params(12))
    assert not any(a.logprobs == b.logprobs for a, b in zip(found[1::2], every[1::2], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_rows_and_checkpoints_of_the_trainer_have_the_same_bits(make_model, family):
    model = make_model(family)
    engine = make_engine(model)
    rows = [torch.tensor(PROMPTS[3]), torch.tensor(PROMPTS[1]), torch.tensor(PROMPTS[0])]
    with engine.model.training_numerics():
        alone = [model(ids[None], use_cache=False).logits[0] for ids in rows]
        starts = torch.tensor([0, *(len(ids) for ids in rows)]).cumsum(0).int()
        positions = torch.cat([torch.arange(len(ids)) for ids in rows])
        packed = model(
            torch.cat(rows)[None], position_ids=positions[None], cu_seq_lens_q=starts, cu_seq_lens_k=starts,
            max_length_q=90, max_length_k=90, use_cache=False,
        ).logits[0]  # fmt: skip
        assert torch.equal(packed, torch.cat(alone))
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(ids) for ids in rows])[:, None]
        logits = model(padded, attention_mask=mask.long(), use_cache=False).logits
        assert torch.equal(torch.cat([logits[i, : len(ids)] for i, ids in enumerate(rows)]), packed)
        with pytest.raises(ValueError, match="pass cu_seq_lens_q"):
            model(torch.cat(rows)[None], position_ids=positions[None], use_cache=False)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with engine.model.training_numerics():
            loss = model(rows[0][None], use_cache=False).logits.float().logsumexp(-1).square().mean()
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_the_start_up_check_knows_the_window_of_layers_with_entries(make_model, kind):
    model = make_model("deepseek_v4", layer_types=[kind] * make_model("deepseek_v4").config.num_hidden_layers)
    assert set(make_engine(model).model.windows) == {model.config.sliding_window}


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model(torch.tensor([PROMPTS[3]]), use_cache=False).logits
    logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["deepseek_v32", "dots3_note_text", "llama4", "deepseek_v4", "glm5_next"])
def test_gradients_are_those_of_the_models_own_attention_and_an_indexer_has_none(make_model, family):
    model = make_model(family, attn_implementation="eager")
    engine, own = make_engine(model), gradients_of(model)
    with engine.model.training_numerics():
        found = gradients_of(model)
    assert found.keys() == own.keys() and not any("indexer" in name for name in found)
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * float(gradient.abs().max()), rtol=1e-3)


def test_gradients_through_gates_of_ngrams_are_as_near_to_the_exact_ones_as_the_models_own(make_model):
    # A root of small numbers multiplies their roundings, so the two are not near each other.
    model = make_model("qwen4_exp", attn_implementation="eager", experts_implementation="eager")
    exact, own = gradients_of(copy.deepcopy(model).double()), gradients_of(model)
    with make_engine(model).model.training_numerics():
        found = gradients_of(model)
    assert found.keys() == own.keys() and not any("indexer" in name for name in found)
    for name, gradient in exact.items():
        ours, its = ((each[name] - gradient).norm() / gradient.norm() for each in (found, own))
        assert ours < max(2 * its, 1e-4), name


@pytest.mark.parametrize("family", FAMILIES)
def test_retractions_before_any_step_and_a_scarce_pool_change_no_bit(make_model, family):
    engine = make_engine(make_model(family), chunked_prefill_size=30)
    expected = record(engine.generate(PROMPTS, params()))
    for each in (3, 5):
        engine.flush_cache()
        ids = [engine.add(p, params())[0] for p in PROMPTS]
        answers, num_steps = {}, 0
        while engine.has_work:
            if num_steps % each == each - 1:
                engine.pause_generation("retract")
                engine.continue_generation()
            answers |= {c.id: c for c in engine.step()}
            num_steps += 1
        assert record([answers[id] for id in ids]) == expected
    scarce = make_engine(make_model(family), kv_cache="12 blocks", chunked_prefill_size=30, admission_ratio=0)
    squeezed = scarce.generate(PROMPTS, params())
    assert record(squeezed) == expected and sum(c.num_retractions for c in squeezed) >= 1


@pytest.mark.parametrize("spoil", ["right", "part", "wrong"])
@pytest.mark.parametrize("family", ["glm_moe_dsa", "dots3_note_text", *WITH_STATES])
def test_drafts_change_no_bit(make_model, family, spoil):
    cases = [Case(p, params(), RequestOptions(logprob_start_len=0)) for p in PROMPTS]
    expected = play(make_engine(make_model(family), speculation="off"), cases)
    engine = make_engine(make_model(family))
    draft_always(engine, Oracle(outputs_of(expected), 256, spoil))
    assert play(engine, cases) == expected
    assert counts(engine)[0] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_steps_are_recorded(make_model, family):
    engine = make_engine(make_model(family), speculation="off")
    with engine.model.rollout_phase():
        answers = engine.generate(PROMPTS, params(40))
    trusted = {size: step.is_trusted for (size, _), step in engine.parts.runner._graphs._records.items()}
    assert trusted[4] is True and False not in trusted.values()
    assert_trainers_bits(engine, answers)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", INDEXED)
def test_several_ranks_give_the_bits_of_one(make_model, run_world, family, tp, pp):
    of_window = random_models.FAMILIES["dots3_note_text"][1]["per_layer_config"][1]
    kinds = {
        "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "shared"]},
        "dots3_note_text": {
            "layer_types": ["indexed_attention", "sliding_attention"] * 2,
            "per_layer_config": {1: of_window, 3: of_window},
        },
    }
    model = make_model(family, num_hidden_layers=4, mlp_layer_types=["dense", "sparse"] * 2, **kinds.get(family, {}))
    common = {"chunked_prefill_size": 13, "k_blocks": tp}
    wanted = record(make_engine(model, **common).generate(PROMPTS, params()))

    def rank(rank: int) -> object:
        engine = make_engine(model, tp=tp, pp=pp, **common)
        found = record(engine.generate(PROMPTS if engine.is_controller else None, params()))
        engine.close()
        return found

    assert run_world(2, rank) == [wanted] * 2


def test_a_pool_has_room_for_the_indexers_keys(make_model):
    shape, *_ = make_engine(make_model("deepseek_v32")).model.kv_shapes
    assert shape.index_dim == 24
    engine = make_engine(make_model("glm_moe_dsa"))
    assert [s.index_dim for s in engine.model.kv_shapes] == [24, 0, 24]
    per_token = sum((s.key_dim + s.value_dim) * s.num_kv_heads + s.index_dim for s in engine.model.kv_shapes) * 4
    assert engine.state()["kv_bytes"] == 64 * 16 * per_token
    kv = engine.parts.kv_cache
    kv.release()
    assert not kv.tensors and kv.num_bytes == 0


def test_an_indexers_keys_have_a_type_of_their_own(make_model):
    engine = make_engine(make_model("dots3_note_text", torch.bfloat16))
    first, of_window, last = engine.model.kv_shapes
    assert {first.dtype, of_window.dtype, last.dtype} == {torch.bfloat16} and of_window.index_dim == 0
    assert (first.index_dim, first.index_dtype) == (last.index_dim, last.index_dtype) == (24, torch.float32)
    per_token = sum((s.key_dim + s.value_dim) * s.num_kv_heads * 2 + s.index_dim * 4 for s in engine.model.kv_shapes)
    assert engine.state()["kv_bytes"] == 64 * 16 * per_token


def test_an_indexer_that_scores_otherwise_is_refused_by_name(make_model, monkeypatch):
    model = make_model("qwen4_exp")
    own = torch.relu
    kind = type(model.model.layers[1].self_attn.indexer)
    monkeypatch.setitem(
        inspect.unwrap(kind.forward).__globals__,
        "torch",
        SimpleNamespace(**vars(torch) | {"relu": lambda x: own(x) ** 2}),
    )
    with pytest.raises(ValueError, match="Qwen4ExpTextQSAIndexer scores keys in another way than is known here"):
        make_engine(model)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("get_pooled_states", lambda found: (found[0] * 2 - found[0].roll(1, 2), *found[1:])),  # other keys
        ("append_visible_tail", lambda found: found[..., :-1]),  # another tail
    ],
)
def test_an_indexer_that_pools_otherwise_is_refused_by_name(make_model, monkeypatch, method, change):
    model = make_model("glm5_next")
    kind = type(model.model.language_model.layers[1].self_attn.indexer)
    own = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, *args, **named: change(own(self, *args, **named)))
    with pytest.raises(ValueError, match="Glm5NextTextIndexer asks the cache for layers: not supported"):
        make_engine(model)


def test_an_indexer_of_pools_takes_its_cache_by_either_name(make_model):
    indexer = make_model("glm5_next").model.language_model.layers[1].self_attn.indexer
    forward, starts = pooled_indexer_forward(indexer), torch.tensor([0, 7, 30], dtype=torch.int32)
    hidden, residual = (torch.randn(1, 30, layer.in_features) for layer in (indexer.wk, indexer.wq_b))
    cache = RowCache(indexer, 30, starts, starts.diff())
    cache.keywords = {PACKING: starts}
    old, new = (forward(hidden, residual, **{name: cache}).keys for name in ("past_key_values", "cache"))
    assert torch.equal(old, new) and not torch.equal(new, forward(hidden, residual).keys)


def test_pools_that_blocks_do_not_hold_are_refused_at_the_start(make_model):
    with pytest.raises(ValueError, match="an indexer of entries of 5 tokens: block_size must be a multiple, not 16"):
        make_engine(make_model("glm5_next", index_kpool=5, index_topk=10))


@pytest.mark.parametrize(("chunk", "blamed"), [(20, False), (19, True), (None, True)])
def test_a_mask_in_chunks_is_that_of_attention_in_these_chunks_alone(chunk, blamed):
    probe = LayerProbe(512)
    layer = torch.nn.Module()
    layer.layer_idx = 1
    made = chunked_causal_mask_function(20, torch.zeros(1, dtype=torch.int64))
    mask = probe.mask_made(made, 20)
    probe.attention_called(layer, layer.layer_idx, KVShape(2, 32, 32, torch.float32), None, chunk, mask)
    if blamed:
        with pytest.raises(ValueError, match=r"Module .*\(layers \[1\]\)"):
            probe.refuse_faults([1], "Llama4")
    else:
        probe.refuse_faults([1], "Llama4")


def test_attention_that_asks_the_cache_for_more_than_its_length_is_refused(make_model):
    model = make_model("llama4")
    kind = type(model.model.layers[0].self_attn)

    class Curious(kind):
        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
            if past_key_values is not None and past_key_values.get_seq_length(self.layer_idx) is not None:
                past_key_values.get_max_cache_shape(self.layer_idx)
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

    model.model.layers[0].self_attn.__class__ = Curious
    with pytest.raises(ValueError, match="Curious asks the cache for get_max_cache_shape: not supported"):
        make_engine(model)


@pytest.mark.parametrize("kinds", [None, ["chunked_attention"]])
def test_a_layer_outside_of_those_that_a_configuration_lists_has_no_chunks(kinds):
    module = torch.nn.Module()
    module.config = transformers.PretrainedConfig(layer_types=kinds)
    for module.layer_idx in (-1, 1):  # -1: the encoder of sounds of Phi-4
        assert chunk_of(module) is None
