"""Published names have their places in the module, as transformers' own loader puts them there."""

from __future__ import annotations

import math
import re

import pytest
import torch
from safetensors.torch import load_file

from lockstep.rollout.sharding.part import take
from lockstep.rollout.sharding.published_names import PublishedNames, PublishedPiece
from lockstep.rollout.sharding.shards import Shard

GATE = "model.layers.0.mlp.experts.2.gate_proj.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
FAMILIES = ["qwen3_moe", "qwen3_5_moe", "kimi_linear", "nemotron_h", "lfm2_moe", "granitemoehybrid", "llama"]
FAMILIES += ["deepseek_v4", "jamba"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_published_tensor_has_the_place_at_which_transformers_puts_it(family, make_model, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    names, state, own = PublishedNames(model), model.state_dict(), set[str]()
    covered: dict[str, int] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        piece = names.piece(name)
        if piece is None:
            assert torch.equal(state[name], tensor)
            own.add(name)
            continue
        flat = state[piece.whole].reshape(-1)[piece.offset : piece.offset + tensor.numel()]
        assert piece.shape == tuple(tensor.shape) and torch.equal(flat.view(tensor.shape), tensor)
        covered[piece.whole] = covered.get(piece.whole, 0) + tensor.numel()
        siblings = names.siblings(name)
        assert not siblings or piece in siblings
        assert sum(math.prod(one.shape) for one in siblings) in (0, state[piece.whole].numel())
    assert covered == {name: state[name].numel() for name in covered} and not covered.keys() & own
    assert bool(covered) == (family != "llama")


def test_siblings_are_all_experts_in_their_order(make_model):
    names = PublishedNames(make_model("qwen3_moe"))
    found = [piece.name for piece in names.siblings(GATE)]
    assert found == [
        f"model.layers.0.mlp.experts.{n}.{kind}_proj.weight" for n in range(4) for kind in ("gate", "up")
    ]  # fmt: skip
    assert [piece.offset for piece in names.siblings(GATE)] == [n * 32 * 64 for n in range(8)]
    assert names.siblings(FUSED) == names.siblings("no such name") == ()


@pytest.mark.parametrize(
    ("family", "name", "why"),
    [
        ("qwen3_moe", GATE.replace(".2.", ".4."), rf"{FUSED} is [4, 64, 64] and has no such piece"),
        ("qwen3_moe", GATE.replace(".2.", ".02."), "has no such piece"),
        ("qwen3_moe", GATE.replace(".2.", ".two."), "has no such piece"),
        ("qwen3_moe", GATE.replace("2", "9" * 5000), "has no such piece"),
        ("olmo_hybrid", "model.layers.0.linear_attn.v_conv1d.weight", "pieces that differ in size"),
    ],
    ids=["one too many", "another spelling", "no number", "a long number", "pieces of several sizes"],
)
def test_a_name_without_a_place_is_refused(family, name, why, make_model):
    names = PublishedNames(make_model(family))
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{re.escape(name)}: .*{re.escape(why)}"):
            names.piece(name)


def test_names_of_the_module_and_unknown_ones_are_no_pieces(make_model):
    names = PublishedNames(make_model("qwen3_moe"))
    assert names.piece(FUSED) is names.piece("model.layers.7.mlp.experts.0.up_proj.weight") is names.piece("") is None
    assert names.piece("layers.0.mlp.gate.weight") == PublishedPiece(
        "layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight", (4, 64), 0
    )


@pytest.mark.parametrize(
    "shard",
    [
        Shard.whole((4, 6, 8)),
        Shard((4, 6, 8), 1, ((0, 2), (4, 5))),
        Shard((4, 6, 8), 2, ((2, 4),)),
        Shard((4, 6, 8), 0, ((1, 3),)),
        Shard((4, 6, 8), 0, ((0, 1), (3, 4))),
    ],
)
@pytest.mark.parametrize("expert", range(4))
@pytest.mark.parametrize("half", [0, 1])
def test_the_part_of_a_piece_is_the_piece_of_a_part(shard, expert, half):
    whole = torch.arange(4 * 6 * 8).view(4, 6, 8)
    piece = PublishedPiece("gate", "experts", (3, 8), expert * 48 + half * 24)
    part, place = piece.part(take(whole, shard), shard)
    assert place.full_shape == (3, 8) and tuple(part.shape) == place.shape
    assert not place.ranges or torch.equal(part, take(whole[expert, 3 * half : 3 * half + 3], place))
    held = take(torch.arange(4 * 6 * 8).view(4, 6, 8), shard)
    inside = (held >= piece.offset) & (held < piece.offset + 24)
    assert torch.equal(part.reshape(-1), held[inside])


def test_the_part_of_a_tensor_of_another_name_is_the_part():
    shard = Shard((6, 8), 0, ((2, 4),))
    part = torch.zeros(2, 8)
    assert PublishedPiece("old", "new", (6, 8), 0).part(part, shard) == (part, shard)
    joined = PublishedPiece("k", "qkv", (2, 8), 16)
    assert joined.part(part, shard)[1] == Shard.whole((2, 8))
    assert joined.part(torch.zeros(6, 4), Shard((6, 8), 1, ((0, 4),)))[1] == Shard((2, 8), 1, ((0, 4),))
