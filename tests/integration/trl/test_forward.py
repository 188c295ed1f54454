"""The packed forward answers TRL's scoring call with the engine's bits, whatever the padding is."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.trl.forward import PackedForward
from lockstep.integration.trl.packed_rows import pack_rows
from lockstep.kernels.sampling.entropy import row_entropy
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams

TEMPERATURE = 0.7
PROMPTS = [[5, 6, 7] * 7, [9, 10], [11, 12, 13, 14, 15]]


@pytest.fixture
def hosted(make_model, request):
    """Yield a packed forward, its module and an engine around the module."""
    family, dtype = getattr(request, "param", ("qwen3", torch.float32))
    module = make_model(family, dtype)
    forward = PackedForward(module, TEMPERATURE)
    engine = Engine(module, EngineConfig(kv_cache="64 blocks", max_num_seqs=8))
    forward.hosted = engine.model
    yield forward, module, engine
    engine.close()
    forward.remove()
    assert "forward" not in vars(module)


def drawn(engine):
    params = [SamplingParams(max_new_tokens=n, temperature=TEMPERATURE, sampling_seed=n) for n in (9, 6, 3)]
    with engine.model.rollout_phase():
        return engine.generate(PROMPTS, params)


def padded_batch(completions, pad=0, extra=0):
    """Pad prompts on the left and completions on the right, as TRL does, by `extra` columns more than needed."""
    left = max(len(c.prompt_ids) for c in completions) + extra
    right = max(len(c.token_ids) for c in completions) + extra
    rows, masks = [], []
    for c in completions:
        before, after = left - len(c.prompt_ids), right - len(c.token_ids)
        rows.append([pad] * before + [*c.prompt_ids, *c.token_ids] + [pad] * after)
        masks.append([0] * before + [1] * (len(c.prompt_ids) + len(c.token_ids)) + [0] * after)
    input_ids, mask = torch.tensor(rows), torch.tensor(masks)
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[:, :left] = -100
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}, right


CASES = [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("gemma2", torch.float32), ("qwen3_5", torch.float32)]


@pytest.mark.parametrize("hosted", CASES, indirect=True, ids=lambda case: f"{case[0]}-{case[1]}".replace("torch.", ""))
@pytest.mark.parametrize("extra", [0, 3])
def test_scored_logprobs_are_the_engines_to_the_bit(hosted, extra):
    forward, module, engine = hosted
    completions = drawn(engine)
    batch, width = padded_batch(completions, extra=extra)
    module.train()
    out = module(**batch, fused_lm_head=True)
    assert forward.num_scored == 1
    for row, completion in zip(out.log_probs[:, -width:], completions, strict=True):
        num = len(completion.token_ids)
        assert row[:num].tolist() == list(completion.logprobs)
        assert row[num:].tolist() == [0.0] * (width - num)
    assert out.log_probs.requires_grad and out.log_probs.dtype == torch.float32


def test_another_temperature_gives_other_logprobs(hosted):
    forward, module, engine = hosted
    completions = drawn(engine)
    batch, width = padded_batch(completions)
    forward._temperature = TEMPERATURE + 1e-3
    row = module(**batch, fused_lm_head=True).log_probs[0, -width:].tolist()
    assert row != list(completions[0].logprobs)
    assert row == pytest.approx(list(completions[0].logprobs), abs=0.1)


def test_gradients_and_entropy_are_those_of_the_padded_forward(hosted):
    _, module, engine = hosted
    completions = drawn(engine)
    batch, _ = padded_batch(completions)
    module.train()
    out = module(**batch, fused_lm_head=True)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    plain = type(module).forward(module, batch["input_ids"], batch["attention_mask"], use_cache=False).logits[:, :-1]
    logprobs = (plain.float() / TEMPERATURE).log_softmax(-1)
    labels = batch["labels"][:, 1:]
    chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    entropy = -(logprobs.exp() * logprobs).sum(-1) * (labels != -100)
    torch.testing.assert_close(out.log_probs, chosen, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.entropy, entropy, atol=1e-4, rtol=1e-4)
    (chosen.sum() + entropy.sum()).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=2e-3, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_batch_of_which_nothing_is_scored_has_gradients_of_zero(hosted):
    _, module, engine = hosted
    batch, _ = padded_batch(drawn(engine))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    module.train()
    out = module(**batch, fused_lm_head=True)
    assert not out.log_probs.any() and out.log_probs.requires_grad
    out.log_probs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


def test_autocast_changes_no_bit(hosted):
    _, module, engine = hosted
    batch, _ = padded_batch(drawn(engine))
    plain = module(**batch, fused_lm_head=True).log_probs
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(**batch, fused_lm_head=True).log_probs, plain)


def test_other_calls_run_the_module_as_it_is(hosted):
    _, module, _ = hosted
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(module(ids, use_cache=False).logits, type(module).forward(module, ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": torch.zeros(1)}, "a batch has images: Qwen3ForCausalLM takes no images"),
        ({"image_sizes": torch.zeros(1, 2)}, "passes image_sizes: only text and images"),
        ({"labels": None}, "lacks input_ids, attention_mask or labels"),
    ],
)
def test_what_is_not_text_is_refused_by_name(hosted, change, message):
    _, module, engine = hosted
    batch, _ = padded_batch(drawn(engine))
    with pytest.raises(ValueError, match=message):
        module(**batch | change, fused_lm_head=True)


def test_rows_are_packed_in_order_and_found_again():
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    labels = torch.tensor([[-100, -100, 6, 7], [-100, 9, -100, -100]])
    rows = pack_rows(ids, mask, labels)
    assert rows.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert rows.cu_seq_lens.tolist() == [0, 3, 5]
    assert rows.logit_rows.tolist() == [0, 1, 3]
    assert rows.targets.tolist() == [6, 7, 9]
    assert rows.padded(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]
    assert [one.places for one in rows.sequences()] == [slice(0, 2), slice(2, 3)]


@pytest.mark.parametrize(
    ("mask", "labels", "message"),
    [
        ([[1, 0, 1]], [[-100, -100, -100]], r"rows \[0\] are empty, or have padding between"),
        ([[1, 1, 1], [0, 0, 0]], [[-100] * 3] * 2, r"rows \[1\] are empty"),
        ([[0, 1, 1]], [[-100, 5, -100]], "the first token of a sequence"),
        ([[1, 1, 0]], [[-100, 5, 5]], "padding is scored"),
    ],
)
def test_batches_that_cannot_be_packed_are_refused(mask, labels, message):
    with pytest.raises(ValueError, match=message):
        pack_rows(torch.full((len(mask), 3), 5), torch.tensor(mask), torch.tensor(labels))


def test_entropy_is_computed_in_blocks_with_the_right_gradient(monkeypatch):
    monkeypatch.setattr("lockstep.kernels.sampling.entropy._MAX_WIDENED", 14)
    torch.manual_seed(0)
    logits = torch.randn(5, 7, requires_grad=True)
    weights = torch.arange(1.0, 6.0)
    ours = row_entropy(logits, 0.5)
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    torch.testing.assert_close(ours, expected)
    [ours_grad] = torch.autograd.grad((ours * weights).sum(), logits)
    [expected_grad] = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(ours_grad, expected_grad)


def test_each_row_may_have_an_entropy_of_its_own_temperature_and_greedy_ones_that_of_the_model():
    logits = torch.randn(3, 7)
    rows = row_entropy(logits, torch.tensor([0.5, 1.0, 2.0]))
    assert rows.tolist() == [row_entropy(logits, each)[at].item() for at, each in enumerate((0.5, 1.0, 2.0))]
    assert torch.equal(row_entropy(logits, 0.0), row_entropy(logits, 1.0))
    with pytest.raises(ValueError, match="a temperature of -1"):
        row_entropy(logits, -1)


@pytest.mark.parametrize("hosted", [("qwen3_moe", torch.float32)], indirect=True, ids=["qwen3_moe"])
def test_the_routers_loss_is_over_the_tokens_without_padding(hosted):
    _, module, engine = hosted
    completions = drawn(engine)
    batch, width = padded_batch(completions, extra=2)
    module.train()
    out = module(**batch, fused_lm_head=True, output_router_logits=True)
    right = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    plain = type(module).forward(module, **right, use_cache=False, output_router_logits=True)
    torch.testing.assert_close(out.aux_loss, plain.aux_loss, atol=1e-5, rtol=1e-5)
    assert out.log_probs[0, -width:][: len(completions[0].token_ids)].tolist() == list(completions[0].logprobs)
    out.aux_loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in module.parameters())
