"""Tests of slices of a folder: every half of every tensor, in whatever pieces the folder has it."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.sharding.checkpoint_slices import CheckpointSlices
from lockstep.rollout.sharding.shards import Shard
from lockstep.weight_sync.disk.folder import read_folder
from lockstep.weight_sync.disk.plan_reader import PlanReader


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "kimi_linear", "inkling2"])  # stacks; three pieces; pairs
def test_every_half_of_every_tensor_is_read(make_model, tmp_path, family, is_mapped):
    model = make_model(family)
    model.save_pretrained(tmp_path)
    num_joined = 0
    open_folder = None if is_mapped else lambda: PlanReader(read_folder(tmp_path))
    with CheckpointSlices(tmp_path, model, open_folder) as slices:
        assert set(slices.names()) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            shape = tuple(tensor.shape)
            is_joined = len(slices.keys_of(name)) > 1
            num_joined += is_joined
            assert torch.equal(slices.read(name, Shard.whole(shape)), tensor), name
            for dim, size in enumerate(shape):
                if size % 2 or (dim == 0 and is_joined and tensor.dim() == 3 and "experts" in name):
                    continue
                for start in (0, size // 2):
                    read = slices.read(name, Shard(shape, dim, ((start, start + size // 2),)))
                    assert torch.equal(read, tensor.narrow(dim, start, size // 2)), (name, dim, start)
    assert (num_joined > 0) == (family != "inkling2")


def test_ranges_of_a_tensor_of_pairs_are_read(make_model, tmp_path):
    model = make_model("inkling2")
    model.save_pretrained(tmp_path)
    name, tensor = "model.layers.1.mlp.experts.gate_up_proj", model.model.layers[1].mlp.experts.gate_up_proj
    with CheckpointSlices(tmp_path, model) as slices:
        for ranges in (((0, 16), (32, 48)), ((20, 40),), ((63, 64),), ((0, 64),)):
            read = slices.read(name, Shard(tuple(tensor.shape), 1, ranges))
            assert torch.equal(read, torch.cat([tensor[:, start:stop] for start, stop in ranges], 1))
