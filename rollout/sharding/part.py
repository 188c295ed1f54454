"""A rank's part of a model: built on the meta device, cut to the rank's stage and shards, and only then given memory.

It is filled from a folder of safetensors files, of which only its slices are read, or from a module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ..ranks.mesh import Mesh
from .checkpoint_slices import CheckpointSlices
from .division import Division, divide
from .pp_cut import PassedLayer, cut_stage, stage_layers, stage_problems
from .shards import Shard
from .skeleton import skeleton_of
from .tied_parameters import apart_in, stored_ties, untie


@dataclass(frozen=True)
class Part:
    """One rank's part of a model: the module without the other ranks' parts, and the part's place in the whole."""

    module: PreTrainedModel
    division: Division
    stage_input: PassedLayer | None  # passes the stage's input to its first layer; None on the first stage
    folder: Path | None = None  # that the weights were loaded from


def load_part(
    path: str | Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, mesh: Mesh, k_blocks: int
) -> Part:
    """Load this rank's part of a model folder. Raises ValueError listing indivisible and missing tensors."""
    skeleton = skeleton_of(config, dtype)
    with CheckpointSlices(path, skeleton) as slices:
        ties = stored_ties(skeleton, slices)
        part = build_part(config, dtype, mesh, k_blocks, apart=ties.apart)

        def read(name: str, shard: Shard) -> Tensor:
            return slices.read(ties.stored_as.get(name, name), shard)

        slices.require(ties.stored_as.get(name, name) for name, _ in part.module.named_parameters())
        _materialise(part, device, read)
        _compute_buffers(part.module, device, slices)
    if (Path(path) / GENERATION_CONFIG_NAME).is_file():
        part.module.generation_config = GenerationConfig.from_pretrained(path)
    return Part(part.module.eval(), part.division, part.stage_input)


def copy_part(source: PreTrainedModel, mesh: Mesh, k_blocks: int) -> Part:
    """Copy this rank's part of a module that every rank holds whole, or as DTensors.

    With DTensors it is a collective of the ranks that share them, one parameter after another.
    """
    parameters = dict(source.named_parameters(remove_duplicate=False))
    part = build_part(copy.deepcopy(source.config), next(source.parameters()).dtype, mesh, k_blocks, like=parameters)
    gathered = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
    shards = part.division.shards
    whole: dict[str, Tensor] = {}
    own = {name for name, _ in part.module.named_parameters()}
    for name, parameter in gathered.items():  # on every rank, wanted or not: gathering is collective
        full = cast(DTensor, parameter.detach()).full_tensor()
        if name in own:
            whole[name] = take(full, shards[name])

    def read(name: str, shard: Shard) -> Tensor:
        return whole[name] if name in whole else take(parameters[name].detach(), shard)

    _materialise(part, next(source.parameters()).device, read)
    buffers = dict(source.named_buffers(remove_duplicate=False))
    for owner_name, owner in part.module.named_modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                owner._buffers[leaf] = buffers[f"{owner_name}.{leaf}" if owner_name else leaf].detach().clone()
    part.module.generation_config = copy.deepcopy(source.generation_config)
    return Part(part.module.eval(), part.division, part.stage_input)


def take(full: Tensor, shard: Shard) -> Tensor:
    """Return the shard of a whole tensor; a view if it has one range."""
    if shard.is_whole:
        return full
    parts = [full.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim)


def build_part(
    config: PretrainedConfig,
    dtype: torch.dtype,
    mesh: Mesh,
    k_blocks: int,
    like: Mapping[str, Tensor] | None = None,
    apart: Collection[str] = (),
) -> Part:
    """Build the part without memory: every tensor on the meta device, whole. Raises ValueError for an indivisible
    model.

    like: parameters whose dtypes it takes, where they are not all the same, and of which different ones are not tied.
    apart: without like, the names of parameters that are not tied although the configuration says so.
    """
    module = skeleton_of(config, dtype)
    untie(module, apart_in(like, module) if like else apart)
    if like:
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(like[name].dtype)
    if mesh.pp > 1 and (problems := stage_problems(module)):
        raise ValueError("; ".join(problems))
    layers = stage_layers(module.config.get_text_config(decoder=True).num_hidden_layers, mesh.pp, mesh.pp_rank)
    division = divide(module, mesh, k_blocks, layers)
    stage_input = None
    if mesh.pp > 1:
        stage_input = cut_stage(module, layers, is_first=mesh.is_first_stage, is_last=mesh.is_last_stage)
    return Part(module, division.only(_names(module)), stage_input)


def _names(module: nn.Module) -> set[str]:
    tensors = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name for pairs in tensors for name, _ in pairs}


def _materialise(part: Part, device: torch.device, read: Callable[[str, Shard], Tensor]) -> None:
    """Replace the parameters by tensors of their shard's shape, filled one by one; tied ones stay one."""
    made: dict[int, nn.Parameter] = {}
    for owner_name, owner in part.module.named_modules():
        for leaf, skeleton in list(owner.named_parameters(recurse=False)):
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            if id(skeleton) not in made:
                shard = part.division.shards[name]
                tensor = torch.empty(shard.shape, dtype=skeleton.dtype, device=device)
                tensor.copy_(read(name, shard))
                made[id(skeleton)] = nn.Parameter(tensor, requires_grad=False)
            owner._parameters[leaf] = made[id(skeleton)]
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape


@torch.no_grad()
def _compute_buffers(module: PreTrainedModel, device: torch.device, slices: CheckpointSlices) -> None:
    """Set the buffers as transformers does when it loads: from the folder, or computed by the model that they are in,
    which of an encoder inside another model is the encoder."""
    models: dict[str, PreTrainedModel] = {}
    for owner_name, owner in module.named_modules():
        around = models.get(owner_name.rpartition(".")[0], module)
        models[owner_name] = owner if isinstance(owner, PreTrainedModel) else around
        buffers = [(leaf, buffer) for leaf, buffer in owner.named_buffers(recurse=False) if buffer.is_meta]
        if not buffers:
            continue
        for leaf, buffer in buffers:
            owner._buffers[leaf] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        kept = {leaf: p.clone() for leaf, p in owner.named_parameters()}
        models[owner_name]._init_weights(owner)  # computes the buffers, but also initialises weights: restore them
        for leaf, parameter in owner.named_parameters():
            parameter.copy_(kept[leaf])
        for leaf, _ in buffers:
            name = f"{owner_name}.{leaf}" if owner_name else leaf
            if slices.holds(name):
                owner._buffers[leaf].copy_(slices.read(name, Shard.whole(tuple(owner._buffers[leaf].shape))))
