"""The division of a model over the ranks of a replica, and this rank's part of it. Plain values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ...kernels.self_test import Cut
from ..ranks.mesh import Mesh
from .shards import Shard
from .tp_plan import Roles, layer_cuts, plan_shards, roles_of

FullSpec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Division:
    """One rank's view of a divided model; names are those of the whole model throughout."""

    mesh: Mesh
    k_blocks: int
    roles: Roles
    shards: Mapping[str, Shard]  # of the parameters and buffers that this rank has
    layers: range  # that this rank runs
    full_specs: Mapping[str, FullSpec]  # of every parameter of the whole model, tied ones under their first name
    buffer_specs: Mapping[str, FullSpec]  # of its buffers that belong to checkpoints; every rank of their layer has all
    tied_names: Mapping[str, str]  # further names of tied parameters of the whole model -> the first
    linear_shapes: tuple[tuple[int, int], ...]  # of the whole model's layers, and ...
    cuts: tuple[Cut, ...]  # ... the ways they may be divided: the self-test runs them, alike on all ranks

    def holds_part(self, name: str) -> bool:
        """Return whether this rank has less than the whole tensor."""
        return name in self.shards and not self.shards[name].is_whole

    def only(self, names: Collection[str]) -> Division:
        """Return the division with the shards of these tensors only, a stage's for instance."""
        return replace(self, shards={name: shard for name, shard in self.shards.items() if name in names})


def divide(module: PreTrainedModel, mesh: Mesh, k_blocks: int, layers: range) -> Division:
    """Divide a whole module (it may be on the meta device), before its stage is cut out.

    Raises ValueError listing everything that cannot be divided.
    """
    roles = roles_of(module) if mesh.tp > 1 or k_blocks > 1 else Roles({}, ())
    shards = plan_shards(module, roles, mesh.tp, mesh.tp_rank, k_blocks)
    stored = module.state_dict(keep_vars=True).keys()
    first: dict[int, str] = {}
    pairs = module.named_parameters(remove_duplicate=False)
    tied = {name: known for name, p in pairs if (known := first.setdefault(id(p), name)) != name}
    return Division(
        mesh=mesh,
        k_blocks=k_blocks,
        roles=roles,
        shards=shards,
        layers=layers,
        full_specs={name: (p.dtype, tuple(p.shape)) for name, p in module.named_parameters()},
        buffer_specs={name: (b.dtype, tuple(b.shape)) for name, b in module.named_buffers() if name in stored},
        tied_names=tied,
        linear_shapes=tuple(sorted({_matrix_shape(m) for m in module.modules() if type(m) is nn.Linear})),
        cuts=tuple(layer_cuts(module, roles, k_blocks)),
    )


def _matrix_shape(linear: nn.Linear) -> tuple[int, int]:
    num_rows, num_columns = linear.weight.shape
    return num_rows, num_columns
