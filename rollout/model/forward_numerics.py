"""A module's attention, experts and operations, put in place together and taken away together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from ...kernels.attention.paged import attention_path
from ..sharding.division import Division
from .attention import ATTENTION_NAMES
from .experts import EXPERTS
from .numerics import Numerics


class ForwardNumerics:
    """What a module runs with while `installed()`: a stage of the rollout, or the trainer's whole module, alike."""

    def __init__(self, module: PreTrainedModel, invariant: bool, division: Division) -> None:
        self.module = module
        self.numerics = Numerics(module, invariant, division)
        # Ranks that share experts need the sums of their parts, which only our implementation makes.
        self._own_experts = invariant or division.mesh.tp > 1
        self._lock = threading.RLock()
        self._num_users = 0
        self._exit = ExitStack()  # how to leave: the last one out does

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Re-entrant, also from several threads: as the last one leaves, attention and experts implementation and every
        forward are what they were."""
        with self._lock:
            if self._num_users == 0:
                with ExitStack() as entered:
                    config = self.module.config
                    entered.callback(self._restore, config._attn_implementation, config._experts_implementation)
                    self._use_implementations()
                    entered.enter_context(self.numerics.installed())
                    self._exit = entered.pop_all()
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._exit.close()

    def _use_implementations(self) -> None:
        parameter, guarantee = next(self.module.parameters()), self.numerics.guarantee
        path = guarantee.attention if guarantee else attention_path(parameter.device, parameter.dtype)
        self.module.set_attn_implementation(ATTENTION_NAMES[path])
        if self._own_experts and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation(EXPERTS)

    def _restore(self, attention: str | None, experts: str | None) -> None:
        # The attributes that transformers' setters write; the setters refuse some values that a module may start with.
        self.module.config._attn_implementation_internal = attention
        self.module.config._experts_implementation_internal = experts
