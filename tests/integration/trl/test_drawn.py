"""The comparison of a trainer's log-probabilities with the engine's."""

from __future__ import annotations

import math

import torch

from lockstep.integration.trl.drawn import DrawnLogprobs
from lockstep.integration.trl.packed_rows import pack_rows
from lockstep.rollout.completion import Completion, FinishReason


def test_a_gap_that_is_no_number_is_infinite_whatever_is_compared_beside_it():
    ids = torch.tensor([[1, 2, 3, 4]])
    rows = pack_rows(ids, torch.ones_like(ids), torch.tensor([[-100, -100, 3, 4]]))
    drawn = DrawnLogprobs()
    reason = FinishReason("length", length=2)
    drawn.remember("train", "w", [Completion("x", 0, (1, 2), (3, 4), "", (-1.0, -2.0), reason, 0, 0, "1", None, ())])
    for second in (math.nan, -2.5):
        drawn.compare(rows, torch.tensor([-1.0, second]), "w")
    assert drawn.take() == (math.inf, 4)
    drawn.compare(rows, torch.tensor([-1.0, -2.5]), "w")
    assert drawn.take() == (0.5, 2)
