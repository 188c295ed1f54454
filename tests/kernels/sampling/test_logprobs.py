"""The temperatures of log-probabilities that a trainer computes."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.sampling.logprobs import scaled_logprobs, selected_logprobs


def test_temperatures_of_greedy_answers_stand_for_one_and_negative_ones_are_refused():
    logits, ids = torch.randn(3, 40, dtype=torch.float32), torch.tensor([1, 2, 3])
    for temperature in (0.0, 0, 1e-7):
        assert torch.equal(selected_logprobs(logits, ids, temperature), selected_logprobs(logits, ids))
        assert torch.equal(scaled_logprobs(logits, temperature), scaled_logprobs(logits, 1.0))
    for temperature in (-1.0, float("nan"), float("inf"), 1e39):
        with pytest.raises(ValueError, match="a temperature of"):
            selected_logprobs(logits, ids, temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_logits_that_are_no_rows_are_refused_by_their_shape(shape, dtype):
    logits = torch.zeros(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"not \[rows, vocabulary\]: flatten them$"):
        scaled_logprobs(logits, 1.0)
    with pytest.raises(ValueError, match=r"not \[rows, vocabulary\]: flatten them and token_ids"):
        selected_logprobs(logits, torch.zeros(shape[:-1], dtype=torch.int64))
