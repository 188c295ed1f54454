"""Layers with parts that know of their sequences by the cache alone: in packed rows of a trainer that checkpoints."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine

LENGTHS = [1, 37, 2, 1, 50, 3]  # some are shorter than a convolution, or than a window that is compressed


@pytest.mark.parametrize(
    "family", ["inkling", "inkling2", "deepseek_v4", "llama4", "jamba", "mamba2", "mamba", "zamba", "zamba2"]
)
def test_checkpoints_of_packed_rows_give_the_same_bits(make_model, restore_threads, family):
    torch.set_num_threads(1)
    model = make_model(family).train()
    engine = Engine(model, EngineConfig(kv_cache="16 blocks", max_num_seqs=4))
    ids = torch.tensor([[(13 * i + 5) % 250 for i in range(sum(LENGTHS))]])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = {"position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "use_cache": False}
    with engine.model.training_numerics():
        alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    found = []
    for checkpoints in (None, False, True):
        if checkpoints is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        model.zero_grad()
        with engine.model.training_numerics():
            logits = model(ids, max_length_q=50, max_length_k=50, **packed).logits
            logits.float().logsumexp(-1).square().mean().backward()
        assert torch.equal(logits, torch.cat(alone, 1))
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed, reentrant = found
    assert checkpointed.keys() == plain.keys() and all(torch.equal(checkpointed[name], plain[name]) for name in plain)
    for name, gradient in reentrant.items():  # autograd adds the gradients of a state in another order
        torch.testing.assert_close(gradient, plain[name], atol=1e-5 * float(plain[name].abs().max()), rtol=1e-4)
