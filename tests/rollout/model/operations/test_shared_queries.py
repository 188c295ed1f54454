"""Tests of attention whose queries are the same at every position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.rollout.model.attention import hosted_attention
from lockstep.rollout.model.operations.shared_queries import (
    SHARED_QUERIES,
    makes_no_queries,
    shared_query_attention,
)


def by_row(x: Tensor, weight: Tensor, _: None) -> Tensor:
    """Compute a product whose rows have the same bits among others."""
    return (x[..., None, :] * weight).sum(-1)


def never(*_: object) -> Tensor:
    raise AssertionError("the product of linear layers was called")


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("num_states", [1, 2, 9])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_values_and_gradients_are_pytorchs_and_a_position_has_its_bits_alone(
    num_queries: int, num_states: int, num_rows: int
) -> None:
    attend = shared_query_attention(by_row)
    queries, states = torch.randn(num_queries, 24), torch.randn(1, num_rows, num_states, 24)
    found = []
    for function in (attend, F.scaled_dot_product_attention):
        leaves = [t.clone().requires_grad_() for t in (queries, states)]
        out = function(leaves[0].expand(1, num_rows, -1, -1), leaves[1], leaves[1], scale=0.3)
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    for row in range(num_rows):
        own = states[:, row : row + 1]
        assert torch.equal(attend(queries.expand(1, 1, -1, -1), own, own, scale=0.3), found[0][0][:, row : row + 1])


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}, {"dropout_p": 0.0}]
)
def test_other_calls_are_pytorchs(options: dict[str, object]) -> None:
    query, key = torch.randn(1, 5, 3, 8), torch.randn(1, 5, 3, 8)
    found = shared_query_attention(never)(query, key, key, **options)
    assert torch.equal(found, F.scaled_dot_product_attention(query, key, key, **options))


class Residual(nn.Module):
    """A module that calls the attention interface with queries of its own, as Inkling 2's since transformers 5.24."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.randn(3, 24)), nn.LayerNorm(24)


class Projecting(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(24, 24)


class InLayer(Residual):
    layer_idx = 0


def test_a_module_with_queries_of_its_own_attends_by_the_hosted_interface() -> None:
    part, states = Residual(), torch.randn(1, 7, 2, 24)
    assert makes_no_queries(part) and not any(makes_no_queries(kind()) for kind in (Projecting, InLayer, nn.Identity))
    setattr(part, SHARED_QUERIES, shared_query_attention(by_row))
    found, _ = hosted_attention(part, part.query.expand(1, 7, -1, -1), states, states, None, scaling=0.3, path="torch")
    expected = F.scaled_dot_product_attention(part.query.expand(1, 7, -1, -1), states, states, scale=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    with pytest.raises(ValueError, match="Residual is not causal: not supported"):
        hosted_attention(part, torch.randn(1, 7, 2, 24), states, states, None, path="torch")
