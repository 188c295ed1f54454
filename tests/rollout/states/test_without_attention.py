"""Models without attention: no KV, a context without a limit, and layers that are told of nothing but the cache."""

from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, MambaConfig, xLSTMConfig

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model.supported import DEFAULT_CONTEXT, context_length
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.configs import tiny_config

FAMILIES = pytest.mark.parametrize("family", ["mamba2", "mamba", "falcon_mamba"])
PROMPTS = [[3, 17, 90, 4, 55], [(11 * i + 3) % 250 for i in range(60)], [250], [(7 * i + 1) % 250 for i in range(33)]]


def params(index: int, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=40, temperature=0.7, sampling_seed=index, ignore_eos=True, **others)


def record(engine: Engine) -> list[tuple[object, ...]]:
    answers = engine.generate(PROMPTS, [params(index) for index in range(len(PROMPTS))])
    engine.check_integrity()
    return [(c.token_ids, c.logprobs) for c in answers]


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def test_a_context_without_a_limit_is_as_long_as_asked_for(make_model):
    model = make_model("mamba2")
    for asked, length in ((None, DEFAULT_CONTEXT), (100_000, 100_000), (48, 48)):
        engine = Engine(model, EngineConfig(kv_cache="16 blocks", max_model_len=asked))
        assert engine.max_model_len == length
        engine.close()
    [answer] = Engine(model, EngineConfig(kv_cache="16 blocks", max_model_len=48)).generate([[1] * 40], params(0))
    assert answer.num_completion_tokens == 8
    limited = MambaConfig(max_position_embeddings=64)
    assert [context_length(limited, asked) for asked in (None, 100, 48)] == [64, 64, 48]
    assert [context_length(tiny_config("jamba"), asked) for asked in (None, 10_000)] == [512, 512]
    with pytest.raises(ValueError, match="max_position_embeddings"):
        context_length(BloomConfig())


def test_the_pool_of_kv_takes_no_memory_and_is_given_out_as_any_other(make_model):
    model = make_model("mamba2")
    engine = Engine(model, EngineConfig(max_num_seqs=4, max_model_len=1024, state_snapshots=12))
    state = engine.state()
    assert (state["kv_bytes"], state["num_blocks"]) == (0, 4 * 1024 // 16)
    in_slot = 3 * 4 * (4 * 20 * 32 + 3 * (128 + 2 * 2 * 20))  # layers, float32; heads, states, width; taps, channels
    assert state["state_bytes"] == state["num_state_slots"] * in_slot
    assert engine.weights.release_kv() == state["state_bytes"] == engine.weights.resume_kv()
    found = record(engine)
    assert engine.generate([PROMPTS[1]], params(1))[0].num_cached_tokens > 0
    small = Engine(model, EngineConfig(kv_cache="9 blocks", max_num_seqs=4))
    assert record(small) == found
    assert small.state()["metrics"]["num_retractions"] > 0


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_gives_the_bits_of_its_module(make_model, tmp_path, family, dtype):
    model = make_model(family, dtype)
    model.save_pretrained(tmp_path)
    config = EngineConfig(kv_cache="64 blocks", max_num_seqs=4)
    assert record(Engine(str(tmp_path), config)) == record(Engine(model, config))


@FAMILIES
def test_padding_on_either_side_changes_no_bit_of_the_trainers(make_model, family):
    """Rows of padding leave the state of zeros as it is: on the left too, which attention would refuse."""
    engine = Engine(make_model(family), EngineConfig(kv_cache="64 blocks", max_num_seqs=4))
    module, [answer] = engine.model.module, engine.generate([PROMPTS[0]], params(0))
    ids = torch.tensor([*answer.prompt_ids, *answer.token_ids])
    for left, right in ((0, 0), (0, 5), (5, 0)):
        padded = torch.nn.functional.pad(ids, (left, right), value=7)[None]
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))[None]
        with engine.model.training_numerics():
            logits = module(padded, attention_mask=mask).logits[0, left : left + len(ids)]
        chosen = logits[answer.num_prompt_tokens - 1 : -1]
        assert selected_logprobs(chosen, torch.tensor(answer.token_ids), 0.7).tolist() == list(answer.logprobs)


@FAMILIES
def test_positions_of_packed_rows_alone_are_refused(make_model, family):
    engine = Engine(make_model(family), EngineConfig(kv_cache="64 blocks"))
    ids, positions = torch.arange(7)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with engine.model.training_numerics(), pytest.raises(ValueError, match="pass cu_seq_lens_q to say where"):
        engine.model.module(ids, position_ids=positions)


@FAMILIES
def test_a_cache_of_the_callers_is_refused(make_model, family):
    """Hosted layers would begin anew with each of its tokens."""
    engine = Engine(make_model(family), EngineConfig(kv_cache="64 blocks"))
    with engine.model.training_numerics(), pytest.raises(ValueError, match="was given a cache: hosted layers keep"):
        engine.model.module.generate(torch.arange(7)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_other_models_without_attention_are_refused_by_name(make_model, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.models.mamba import modeling_mamba

    config = xLSTMConfig(hidden_size=32, num_heads=2, num_hidden_layers=2, vocab_size=64)
    with pytest.raises(ValueError, match="layers without attention heads, a configuration without max_position"):
        Engine(AutoModelForCausalLM.from_config(config), EngineConfig(kv_cache="16 blocks"))
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", lambda x, *_, **__: 2 * x)
    with pytest.raises(ValueError, match="layers without attention heads, layers of type linear_attention"):
        Engine(make_model("mamba"), EngineConfig(kv_cache="16 blocks"))
