"""Tests of the modules that can be hosted and of their forward under the engine's numerics."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3Model

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import PhaseError
from lockstep.rollout.model.attention import hosted_attention
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.layer_probe import LayerProbe
from lockstep.rollout.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)  # these matrices are small: a second thread would only wait for the first


def adopt(
    module: nn.Module, dtype: str | None = None, device: str | None = None, invariant: bool = True
) -> HostedModel:
    return HostedModel.adopt(module, dtype=dtype, device=device, invariant=invariant)


def logits_of(hosted: HostedModel, ids: list[list[int]], **kwargs: object) -> torch.Tensor:
    with hosted.training_numerics():
        return hosted.module(torch.tensor(ids), use_cache=False, **kwargs).logits


# -- refusals --------------------------------------------------------------------------------------


class BiasedAttention(Qwen3Attention):
    """A module that passes an unknown keyword to its attention."""

    def forward(self, *args: object, **kwargs: object):
        return super().forward(*args, position_bias=torch.zeros(1), **kwargs)


def test_model_that_asks_its_attention_for_something_unknown_is_refused_by_name(make_model):
    model = make_model("qwen3")
    model.model.layers[1].self_attn.__class__ = BiasedAttention
    with pytest.raises(ValueError, match="BiasedAttention asks its attention for position_bias"):
        adopt(model)
    assert model.config._attn_implementation == "sdpa"


class FailingModel(Qwen3Model):
    """A module whose forward does not run on text alone."""

    def forward(self, *args: object, **kwargs: object):
        return len(kwargs["pixel_values"])


def test_module_whose_own_code_fails_is_refused_with_its_error(make_model):
    model = make_model("qwen3")
    model.model.__class__ = FailingModel
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM cannot be hosted: its forward fails .*: KeyError: 'pixel"):
        adopt(model)


def test_configuration_that_is_not_of_a_decoder_is_refused_by_the_names_that_it_lacks(make_model):
    small = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0}
    whisper = transformers.WhisperForCausalLM(transformers.WhisperConfig(**small, encoder_layers=1))
    with pytest.raises(ValueError, match=r"WhisperForCausalLM cannot be hosted: .*without max_position_embeddings"):
        adopt(whisper)
    model = make_model("qwen3")
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot be hosted: an encoder"):
        adopt(model)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda b, h, row, key: (key <= row) & (key // 2048 == row // 2048), None),
        (lambda b, h, row, key: (key <= row) & (key // 3000 == row // 3000), None),
        (lambda b, h, row, key: (key <= row) & (key > row - 4095), 4096),
        (lambda b, h, row, key: (key <= row) | (torch.zeros(4)[key] > 0), None),
    ],
)
def test_mask_that_differs_only_far_behind_or_by_tokens_is_not_a_plain_one(mask, window):
    plain, other = LayerProbe(8192), LayerProbe(8192)
    plain.mask_made(lambda b, h, row, key: (key <= row) & (key > row - (window or 1 << 30)), window)
    other.mask_made(mask, window)
    assert plain._masks[0].is_plain and not other._masks[0].is_plain


class AllRows(Qwen3ForCausalLM):
    """A class that computes all rows, whichever of them it is asked for."""

    def forward(self, *args: object, logits_to_keep: object = 0, **kwargs: object):
        return super().forward(*args, **kwargs)


def test_class_that_does_not_know_logits_to_keep_is_hosted_all_the_same(make_model):
    model = make_model("qwen3")
    model.__class__ = AllRows
    prompts, params = [[3, 17, 90, 4, 55], [9, 8, 7]], SamplingParams(max_new_tokens=4, temperature=0)
    for prompt, found in zip(
        prompts, Engine(model, EngineConfig(kv_cache="16 blocks")).generate(prompts, params), strict=True
    ):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert list(found.token_ids) == expected[0, len(prompt) :].tolist()


def test_every_unknown_keyword_is_named_and_none_values_are_harmless():
    q = torch.zeros(1, 2, 3, 32)
    with pytest.raises(ValueError, match="Identity asks its attention for alibi, head_mask"):
        hosted_attention(nn.Identity(), q, q, q, None, path="torch", head_mask=1, alibi=2, position_ids=3)
    hosted_attention(nn.Identity(), q, q, q, None, path="torch", head_mask=None)


def test_attention_dropout_is_refused_where_it_would_act(make_model):
    model = make_model("qwen3", attention_dropout=0.1)
    hosted = adopt(model)
    logits_of(hosted, [[1, 2, 3]])  # eval: no dropout
    model.train()
    with pytest.raises(ValueError, match=r"dropout \(0.1\)"):
        logits_of(hosted, [[1, 2, 3]])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused_by_name(make_model, rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match=f"Qwen3ForCausalLM cannot be hosted: rope_type '{rope_type}'"):
        adopt(make_model("qwen3", rope_parameters=rope))


@pytest.mark.parametrize("num_rows", [320, 200])
def test_head_of_another_size_than_the_vocabulary_is_refused_by_both_sizes(make_model, num_rows):
    model = make_model("qwen3")
    model.lm_head = nn.Linear(model.config.hidden_size, num_rows, bias=False, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"gives {num_rows} logits, and its configuration has the vocab_size 256"):
        adopt(model)
    model.resize_token_embeddings(num_rows)
    assert adopt(model).vocab_size == num_rows


def test_unsupported_dtype_is_refused_by_name(make_model):
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM cannot be hosted: dtype torch\.float16"):
        adopt(make_model("qwen3", torch.float16))


def test_model_of_another_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="PreTrainedModel or a folder, not Linear"):
        adopt(nn.Linear(2, 2))


def test_model_whose_layers_bypass_the_attention_interface_is_refused_by_name():
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=2, d_inner=32)
    with pytest.raises(ValueError, match="XLNetLMHeadModel cannot be hosted: attention that does not go through"):
        adopt(transformers.XLNetLMHeadModel(config))


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_layers_of_a_kind_that_only_the_mask_would_tell_are_refused_by_name(make_model, kind):
    model = make_model("qwen3")
    model.config.layer_types = ["full_attention", kind]
    with pytest.raises(ValueError, match=f"layers of type {kind}"):
        adopt(model)


def test_attention_that_looks_ahead_is_refused_by_name(make_model):
    model = make_model("qwen3")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="Qwen3Attention is not causal"):
        adopt(model)


def test_wishes_that_contradict_the_trainers_module_are_listed_together(make_model):
    with pytest.raises(ValueError, match=r"dtype='bfloat16', but the module is torch.float32; device='meta'"):
        adopt(make_model("qwen3"), dtype="bfloat16", device="meta")


def test_folder_without_a_config_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path}.* holds no config.json"):
        Engine(tmp_path)


def test_folder_is_loaded_in_its_own_dtype_unless_told_otherwise(make_model, tmp_path):
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    engine = Engine(tmp_path, EngineConfig(kv_cache="4 blocks"))
    assert engine.model.dtype == torch.bfloat16 and engine.model.owned and engine.model.in_rollout_phase
    engine = Engine(str(tmp_path), EngineConfig(kv_cache="4 blocks", dtype="float32"))
    assert engine.model.dtype == torch.float32
    assert not any(p.requires_grad for p in engine.model.module.parameters())
    [completion] = engine.generate([1, 2], {"max_new_tokens": 2})
    assert completion.num_completion_tokens == 2


def test_linear_with_a_forward_of_its_own_is_refused_and_left_alone(make_model):
    model = make_model("qwen3")
    own = model.model.layers[0].mlp.up_proj.forward = lambda x: x
    with pytest.raises(ValueError, match="forward of their own cannot be hosted: Linear"):
        adopt(model)
    assert model.model.layers[0].mlp.up_proj.forward is own
    assert "forward" not in vars(model.lm_head)


# -- the trainer's forward -------------------------------------------------------------------------


def test_padding_on_the_left_is_refused(make_model):
    hosted = adopt(make_model("qwen3"))
    with pytest.raises(ValueError, match="pad on the right"):
        logits_of(hosted, [[0, 1, 2], [3, 4, 5]], attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))


def test_generate_of_transformers_is_refused_under_our_attention(make_model):
    hosted = adopt(make_model("qwen3"))
    with hosted.training_numerics(), pytest.raises(ValueError, match="use_cache=False"):
        hosted.module.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_four_dimensional_mask_is_refused(make_model):
    hosted = adopt(make_model("qwen3"))
    with pytest.raises(ValueError, match="4-D attention mask"):
        logits_of(hosted, [[1, 2, 3]], attention_mask=torch.zeros(1, 1, 3, 3))


def test_packed_row_must_say_where_its_sequences_begin(make_model):
    hosted = adopt(make_model("qwen3"))
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        logits_of(hosted, [[1, 2, 3, 4, 5]], position_ids=positions)
    with pytest.raises(ValueError, match="not in a batch of 2"):
        logits_of(hosted, [[1, 2, 3]] * 2, cu_seq_lens_q=torch.tensor([0, 3], dtype=torch.int32))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("mask", [None, [[1, 1, 1, 1, 1]]])
def test_packed_row_is_refused_with_a_cache_and_with_a_mask_too(make_model, family, mask):
    """transformers looks at position_ids in a forward without both alone."""
    hosted = adopt(make_model(family))
    given = {"attention_mask": None if mask is None else torch.tensor(mask), "use_cache": mask is None}
    with hosted.training_numerics(), pytest.raises(ValueError, match="start over within a row: pass cu_seq_lens_q"):
        hosted.module(torch.tensor([[1, 2, 3, 4, 5]]), position_ids=torch.tensor([[0, 1, 2, 0, 1]]), **given)


@pytest.mark.parametrize("in_inference_mode", [True, False])
def test_positions_that_were_changed_in_place_are_looked_at_again(make_model, in_inference_mode):
    hosted = adopt(make_model("qwen3"))
    with torch.inference_mode(in_inference_mode), hosted.training_numerics():
        ids, positions = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 3, 4]])
        hosted.module(ids, position_ids=positions, use_cache=True)
        positions[0, 3:] -= 3
        with pytest.raises(ValueError, match="start over within a row: pass cu_seq_lens_q"):
            hosted.module(ids, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
def test_positions_of_padding_may_stay_as_they_are(make_model, padding):
    """Trainers make them of the mask: the last position goes on, or another number is written."""
    hosted = adopt(make_model("qwen3"))
    positions = torch.tensor([[0, 1, 2, padding, padding]])
    padded = logits_of(
        hosted, [[1, 2, 3, 0, 0]], position_ids=positions, attention_mask=torch.tensor([[1, 1, 1, 0, 0]])
    )
    assert torch.equal(padded[0, :3], logits_of(hosted, [[1, 2, 3]])[0])


SEQUENCES = [[(5 * i + k) % 250 for i in range(n)] for k, n in enumerate((1, 150, 3, 33, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
def test_packed_sequences_equal_separate_ones_bit_for_bit(make_model, family, dtype):
    hosted = adopt(make_model(family, dtype))
    lengths = torch.tensor([0, *map(len, SEQUENCES)]).cumsum(0).to(torch.int32)
    packed = logits_of(
        hosted,
        [list(chain(*SEQUENCES))],
        cu_seq_lens_q=lengths,
        position_ids=torch.cat([torch.arange(len(s)) for s in SEQUENCES])[None],
    )
    assert packed.requires_grad
    for start, sequence in zip(lengths.tolist(), SEQUENCES, strict=False):
        alone = logits_of(hosted, [sequence])
        assert torch.equal(packed[0, start : start + len(sequence)], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe"])
def test_batch_padded_on_the_right_equals_single_sequences_bit_for_bit(make_model, family, dtype):
    hosted = adopt(make_model(family, dtype))
    longest = max(map(len, SEQUENCES))
    padded = [s + [0] * (longest - len(s)) for s in SEQUENCES]
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in SEQUENCES])
    batch = logits_of(hosted, padded, attention_mask=mask)
    for row, sequence in zip(batch, SEQUENCES, strict=True):
        assert torch.equal(row[: len(sequence)], logits_of(hosted, [sequence])[0])


RECURRENT = ["minimax", "zaya", "inkling", "inkling2", "deepseek_v4"]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_moe", *RECURRENT])
def test_gradients_under_our_numerics_are_those_of_eager_attention(make_model, family):
    hosted = adopt(make_model(family))
    plain = make_model(family, attn_implementation="eager")
    ids, goal = [SEQUENCES[3]], torch.tensor(SEQUENCES[3][1:])
    for logits in (logits_of(hosted, ids), plain(torch.tensor(ids), use_cache=False).logits):
        nn.functional.cross_entropy(logits[0, :-1], goal).backward()
    ours, theirs = dict(hosted.module.named_parameters()), dict(plain.named_parameters())
    assert {n for n, p in ours.items() if p.grad is not None} == {n for n, p in theirs.items() if p.grad is not None}
    for name, parameter in theirs.items():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


def test_resident_tensors_name_tied_weights_once(make_model):
    names = [name for name, _ in adopt(make_model("qwen2")).resident_tensors()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(set(names)) == len(names)


def test_without_invariant_mode_the_modules_own_operations_run(make_model):
    hosted = adopt(make_model("qwen3"), invariant=False)
    assert hosted.numerics.guarantee is None
    with hosted.rollout_phase():
        # Models carry keywords to their attention; their layers and operations are their own.
        assert not any("forward" in vars(m) for m in hosted.module.modules() if not isinstance(m, PreTrainedModel))
    assert "off" in hosted.numerics.describe()


def test_rotary_frequencies_that_a_cast_has_rounded_are_warned_of(make_model, tmp_path, caplog):
    """They are in no file and no digest: two engines of equal weights would differ by tenths of a nat."""
    model = make_model("qwen3")
    model.save_pretrained(tmp_path)
    adopt(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert "rotary" not in caplog.text
    adopt(model.to(torch.bfloat16))
    assert "rotary frequencies are bfloat16 (model.rotary_emb.inv_freq" in caplog.text
    assert "from_pretrained(..., dtype=...)" in caplog.text


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_is_trained_with_router_logits_generates_without(make_model, when):
    model = make_model("qwen3_moe")
    ask = [[1, 2, 3, 4]], SamplingParams(max_new_tokens=5, sampling_seed=1)
    expected = Engine(model, EngineConfig(kv_cache="8 blocks")).generate(*ask)[0].logprobs
    if when == "before":
        model.config.output_router_logits = True
    engine = Engine(model, EngineConfig(kv_cache="8 blocks"))
    model.config.output_router_logits = True
    assert engine.generate(*ask)[0].logprobs == expected
    with engine.model.training_numerics():
        assert model(torch.tensor([[1, 2, 3, 4]]), use_cache=False).aux_loss is not None


@pytest.mark.parametrize("kind", [tuple, torch.tensor, list, lambda ids: ids[0]])
def test_sequences_end_at_every_form_of_eos_token_id(make_model, kind):
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    [whole] = Engine(model, EngineConfig(kv_cache="16 blocks")).generate([[1, 2, 3]], params)
    model.generation_config.eos_token_id = kind([whole.token_ids[2]])
    [cut] = Engine(model, EngineConfig(kv_cache="16 blocks")).generate([[1, 2, 3]], params)
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    model.generation_config.eos_token_id = [[5]]
    with pytest.raises(ValueError, match="eos_token_id of the generation_config holds"):
        Engine(model, EngineConfig(kv_cache="16 blocks"))


def test_parts_are_not_copied_under_the_numerics(make_model):
    model = make_model("qwen3")
    hosted = adopt(model)
    with hosted.training_numerics():
        for part in (model.lm_head, model.model.norm, model.model.layers[0].mlp):
            with pytest.raises(PhaseError, match="cannot be copied"):
                copy.deepcopy(part)
    assert torch.equal(copy.deepcopy(model.lm_head).weight, model.lm_head.weight)


@pytest.mark.parametrize(
    "draw", [lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: torch.dropout_(x, 0.3, True)]
)
def test_random_functions_of_every_name_are_refused(make_model, draw):
    model = make_model("qwen3")
    hosted = adopt(model)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: draw(out) if module.training else out)
    logits_of(hosted, [[1, 2, 3]])
    model.train()
    with pytest.raises(ValueError, match=r"random|dropout"):
        logits_of(hosted, [[1, 2, 3]])


def test_a_buffer_on_the_meta_device_is_named(make_model):
    model = make_model("qwen3")
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    with pytest.raises(ValueError, match=r"has no weights yet: .*rotary_emb\.inv_freq"):
        adopt(model)
