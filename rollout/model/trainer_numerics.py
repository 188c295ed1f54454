"""The engine's numerics for a trainer whose module no engine hosts, since its weights will be divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from ..ranks.mesh import Mesh
from ..sharding.division import divide
from ..sharding.part import Part
from .forward_numerics import ForwardNumerics
from .given_module import given_module
from .supported import refuse_other_kinds, refuse_randomness, refuse_unsupported, warn_of_rounded_frequencies


class TrainerNumerics:
    """The operations of an engine on a module that fully_shard will divide.

    Make them of the module as transformers builds it, also on the meta device, before `fully_shard`, and fill its
    weights when you like:

        numerics = TrainerNumerics(model, device=device, dtype=torch.bfloat16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with numerics.training_numerics():
            loss(model(**packed)).backward()
    """

    def __init__(
        self, module: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None, k_blocks: int = 1
    ) -> None:
        """Plan the operations. device: on which the forward will compute; dtype: in which it will, if that is not the
        weights'; k_blocks: as many as the engine has (`EngineConfig.k_blocks`).

        Raises ValueError for wrappers, for weights that are divided already, and for models that engines refuse.
        """
        self.module = given_module(module, is_copied=False, is_filled_later=True)
        part = whole_part(self.module, k_blocks)
        refuse_unsupported(self.module, self.module.config.get_text_config(decoder=True), True, part.division.layers)
        self._forward = ForwardNumerics(self.module, True, part.division, device=device, dtype=dtype)
        refuse_randomness(self.module)
        warn_of_rounded_frequencies(self.module)

    def describe(self) -> str:
        """Return one line for people: which operations were chosen."""
        return self._forward.numerics.describe()

    @contextmanager
    def training_numerics(self) -> Iterator[None]:
        """Install the operations for a forward and its backward, as `HostedModel.training_numerics` does."""
        refuse_randomness(self.module)
        with self._forward.installed():
            yield


def whole_part(module: PreTrainedModel, k_blocks: int) -> Part:
    """Return a module as the one part of its model."""
    refuse_other_kinds(module)
    num_layers = module.config.get_text_config(decoder=True).num_hidden_layers
    return Part(module, divide(module, Mesh.single(), k_blocks, range(num_layers)), None)
