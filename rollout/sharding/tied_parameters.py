"""Parameters that a configuration ties, such as the embedding and the head, and that the weights may have apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .checkpoint_slices import CheckpointSlices
from .shards import Shard


@dataclass(frozen=True)
class StoredTies:
    """The parameters of a module that its configuration ties, as a folder has them."""

    apart: frozenset[str]  # names of parameters with values of their own
    stored_as: Mapping[str, str]  # names that the folder lacks -> the tied name under which it has the values


def tied_groups(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, in the module's order."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def stored_ties(skeleton: nn.Module, slices: CheckpointSlices) -> StoredTies:
    """Compare the tied parameters of a module with a folder, as transformers does when it loads: different values under
    two names are two parameters. It reads what the folder has under several names, whole."""
    apart, stored_as = set[str](), dict[str, str]()
    for group in tied_groups(skeleton):
        held = [name for name in group if slices.holds(name)]
        if held and held[0] != group[0]:
            stored_as[group[0]] = held[0]
        if len(held) > 1:
            like = skeleton.get_parameter(group[0])
            first, *others = (slices.read(name, Shard.whole(tuple(like.shape))).to(like.dtype) for name in held)
            apart |= {name for name, other in zip(held[1:], others, strict=True) if not torch.equal(first, other)}
    return StoredTies(frozenset(apart), stored_as)


def apart_in(parameters: Mapping[str, Tensor], skeleton: nn.Module) -> frozenset[str]:
    """Return the names that a module ties and that are different tensors among these."""
    groups = tied_groups(skeleton)
    return frozenset(name for group in groups for name in group[1:] if parameters[name] is not parameters[group[0]])


def untie(module: nn.Module, names: Collection[str]) -> None:
    """Replace these parameters by copies, which no other name has. Changes the module."""
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        tied = module.get_parameter(name)
        module.get_submodule(owner_name)._parameters[leaf] = nn.Parameter(tied.detach().clone(), tied.requires_grad)
