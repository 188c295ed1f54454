"""Packed samples: every sampled token is predicted from the row before it."""

from __future__ import annotations

import torch

from lockstep.integration.grpo.training.packing import Sample, pack

A = Sample((1, 2, 3), (4, 5), (-0.1, -0.2), 1.0)
B = Sample((6,), (7, 8, 9), (-0.3, -0.4, -0.5), -2.0)


def test_rows_positions_and_targets_of_two_samples():
    batch = pack([A, B], torch.device("cpu"))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.cu_seq_lens.tolist() == [0, 4, 7]
    assert batch.logit_rows.tolist() == [2, 3, 4, 5, 6]
    assert batch.targets.tolist() == [4, 5, 7, 8, 9]
    assert batch.advantages.tolist() == [1.0, 1.0, -2.0, -2.0, -2.0]
    assert torch.equal(batch.logprobs, torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5]))
