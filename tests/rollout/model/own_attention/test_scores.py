"""Attention of a class's own code: what it does with scores is the hosted attention's, and all else is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.rollout.model.attention import ATTENTION_NAMES
from lockstep.rollout.model.own_attention.layers import OwnAttention
from lockstep.rollout.model.own_attention.scores import Scores

T, H, D = 7, 3, 8
CAUSAL = torch.ones(T, T).tril().log()[None, None]
NO_MASK = torch.zeros(1, 1, 1, 1)


class Attention(nn.Module):
    """An attention with its own code, one of many ways to write it down."""

    layer_idx = 0

    def __init__(self, way) -> None:
        super().__init__()
        self.way, self.dropout = way, nn.Dropout(0.3).eval()
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.register_buffer("band", torch.ones(1, 1, 16, 16, dtype=torch.bool).tril().triu(-3))

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, object]:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        out, weights = self.way(self, q, k, v, mask)
        return out.transpose(1, 2).reshape(hidden.shape), weights


def plain(self, q, k, v, mask):
    weights = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(D) + mask, dim=-1)
    return weights @ v, weights


def wide(self, q, k, v, mask):
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(2, 3)) * 0.5
    weights = nn.Softmax(dim=-1)(mask + scores).type_as(v)
    return torch.matmul(self.dropout(weights), v), weights


def flat(self, q, k, v, mask):
    q, k, v = (t.reshape(-1, T, D) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(-1, H, T, T) + mask
    scores /= 2
    weights = torch.softmax(scores.float(), -1, dtype=torch.float32).to(v.dtype).view(-1, T, T)
    return torch.bmm(weights, v).view(-1, H, T, D), weights


def of_lists(self, q, k, v, mask):
    kept = [q[:, [-1]], q[..., [0], :, :], q[:, [1, 2]], q[:, torch.tensor([0])]]
    assert [part.shape[1] for part in kept] == [1, 1, 2, 1]
    assert torch.equal(kept[0], q[:, 2:]) and torch.equal(kept[1], q[:, :1]) and torch.equal(kept[2], q[:, 1:])
    number = torch.tensor(0.0, dtype=torch.float64)
    assert number.dtype == torch.float64 and torch.tensor(3).dtype == torch.int64
    return plain(self, torch.cat((kept[1], kept[2]), 1) + number.float(), k, v, mask)


def in_window(self, q, k, v, mask):
    scores = torch.where(self.band[:, :, :T, :T], q @ k.mT, torch.tensor(-1e30))
    weights = (scores + mask).softmax(-1)
    return weights @ v, weights


def one_key_head(self, q, k, v, mask):
    weights = F.softmax(q @ k[:, :1].transpose(-1, -2) + mask, dim=-1)
    return weights @ v[:, :1], weights


def filled(self, q, k, v, mask):
    scores = (q @ k.transpose(-1, -2)).masked_fill(mask.to(torch.bool), torch.finfo(q.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).contiguous()
    return weights @ v, weights


@pytest.mark.parametrize(
    "way", [plain, wide, flat, of_lists, in_window, one_key_head, filled], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("batch", [1, 2])
def test_ways_to_write_attention_down_are_the_hosted_attention(way, batch):
    torch.manual_seed(0)
    part, hidden = Attention(way), torch.randn(batch, T, H * D)
    ours = OwnAttention(part, SimpleNamespace(_attn_implementation=ATTENTION_NAMES["torch"]))
    found, weights = ours.forward(hidden, NO_MASK)
    assert weights is None
    torch.testing.assert_close(found, part(hidden, CAUSAL)[0], atol=1e-5, rtol=1e-5)


REFUSED = {
    "adds a tensor [1, 1, 7, 7] to scores": lambda s, v: (s + CAUSAL).softmax(-1) @ v,
    "adds float 2.0 to scores": lambda s, v: (s + 2.0).softmax(-1) @ v,
    "multiplies scores by a tensor [3, 1, 1]": lambda s, v: (s * torch.ones(3, 1, 1)).softmax(-1) @ v,
    "divides scores by int 0": lambda s, v: (s / 0).softmax(-1) @ v,
    "computes tanh of scores": lambda s, v: torch.tanh(s).softmax(-1) @ v,
    "asks scores for clamp": lambda s, v: s.clamp(max=5).softmax(-1) @ v,
    "takes a part of scores": lambda s, v: s[:, :1].softmax(-1) @ v,
    "multiplies scores by float 0.5": lambda s, v: (s.softmax(-1) * 0.5) @ v,
    "along dimension -2": lambda s, v: s.softmax(-2) @ v,
    "along dimension 3": lambda s, v: s.softmax(-1).softmax(3) @ v,
    "before their softmax": lambda s, v: s @ v,
    "draws random numbers (dropout 0.5)": lambda s, v: F.dropout(s.softmax(-1), 0.5, True) @ v,
    "keeps scores where a mask is not set": lambda s, v: torch.where(CAUSAL < 0, torch.tensor(0.0), s) @ v,
    "reshapes scores [1, 3, 7, 7] to [3, 49]": lambda s, v: s.view(3, 49),
    "multiplies a matrix by scores": lambda s, v: torch.matmul(torch.ones(7, 7), s),
    "masks scores by a tensor [1, 1, 7, 7]": lambda s, v: s.masked_fill(CAUSAL < 0, -1e9).softmax(-1) @ v,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_hosted_attention_does_not_compute_is_refused_by_name(what):
    part = Attention(lambda self, q, k, v, mask: (REFUSED[what](q @ k.transpose(-1, -2), v), None))
    ours = OwnAttention(part, SimpleNamespace(_attn_implementation=ATTENTION_NAMES["torch"]))
    with pytest.raises(ValueError) as refused:
        ours.forward(torch.randn(1, T, H * D), NO_MASK)
    assert str(refused.value).startswith("Attention ") and what in str(refused.value)
    assert "not supported" in str(refused.value)


def test_scores_tell_their_form():
    seen = {}

    def way(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2)
        seen["scores"] = scores
        return scores.softmax(-1) @ v, None

    OwnAttention(Attention(way), SimpleNamespace(_attn_implementation=ATTENTION_NAMES["torch"])).forward(
        torch.randn(2, T, H * D), NO_MASK
    )
    scores = seen["scores"]
    assert isinstance(scores, Scores) and scores.shape == (2, H, T, T) and scores.size() == scores.shape
    assert (scores.size(-1), scores.dim(), scores.ndim, scores.device.type) == (T, 4, 4, "cpu")
    assert scores.reshape(-1, T, T).shape == (2 * H, T, T) and scores.to("cpu", torch.bfloat16).dtype == torch.bfloat16
