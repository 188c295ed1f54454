"""A module's attention, experts and operations, installed and removed together."""

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
    """The numerics of one module while `installed()`: of a rollout stage or of the trainer's whole module."""

    def __init__(self, module: PreTrainedModel, invariant: bool, division: Division) -> None:
        self.module = module
        self._tree = list(module.modules())
        self.numerics = Numerics(module, invariant, division)
        # Ranks that share experts need the sums of their parts, and only our implementation computes them.
        self._own_experts = invariant or division.mesh.tp > 1
        self._lock = threading.RLock()
        self._num_users = 0
        self._exit = ExitStack()  # restores the module when the last user leaves

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the numerics for the time of the context. Re-entrant, also from several threads.

        When the last user leaves, the attention and experts implementation and every forward are restored.
        """
        with self._lock:
            if self._num_users == 0:
                self._refuse_other_tree()
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

    def _refuse_other_tree(self) -> None:
        now = list(self.module.modules())
        if len(now) != len(self._tree) or any(a is not b for a, b in zip(now, self._tree, strict=True)):
            new = sorted({type(part).__name__ for part in set(now) ^ set(self._tree)})
            raise ValueError(
                f"the layers of {type(self.module).__name__} are others than when it was hosted ({', '.join(new)}): "
                "add and remove adapters before the engine is made, or make it anew"
            )

    def _use_implementations(self) -> None:
        parameter, guarantee = next(self.module.parameters()), self.numerics.guarantee
        path = guarantee.attention if guarantee else attention_path(parameter.device, parameter.dtype)
        self.module.set_attn_implementation(ATTENTION_NAMES[path])
        if self._own_experts and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation(EXPERTS)

    def _restore(self, attention: str | None, experts: str | None) -> None:
        # transformers' setters write these attributes, but refuse some values that a module may start with.
        self.module.config._attn_implementation_internal = attention
        self.module.config._experts_implementation_internal = experts
