"""A module's attention, experts and operations, installed and removed together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ...kernels.attention.paged import attention_path
from ..errors import PhaseError
from ..sharding.division import Division
from .attention import ATTENTION_NAMES
from .experts import EXPERTS
from .module_code import ModuleCode
from .numerics import Numerics
from .operations.carried import carried, carrying
from .own_attention.layers import interfaced_models, own_attentions
from .tensors import first_weight

_COMPILED = "_compiled_call_impl"  # torch's attribute of modules that were compiled in place
_COMPILER = "torch._dynamo."  # the modules of the functions that torch.compile puts around the one that it compiles
_CHECKPOINT = "_gradient_checkpointing_func"  # transformers' attribute of layers while checkpointing is switched on

_holders: weakref.WeakKeyDictionary[nn.Module, ForwardNumerics] = weakref.WeakKeyDictionary()
_holders_lock = threading.Lock()
_configs_in_use: dict[int, _ConfigInUse] = {}  # by identity; models may share one


class ForwardNumerics:
    """The numerics of one module while `installed()`: of a rollout stage or of the trainer's whole module."""

    def __init__(
        self, module: PreTrainedModel, invariant: bool, division: Division, *,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Plan the operations of the module. device, dtype: see `Numerics`."""
        self.module = module
        self._tree = list(module.modules())
        self.code = ModuleCode(self._tree)
        self.numerics = Numerics(module, invariant, division, device=device, dtype=dtype)
        # Ranks that share experts need the sums of their parts, and only our implementation computes them.
        self._own_experts = invariant or division.mesh.tp > 1
        self._lock = threading.RLock()
        self._num_users = 0
        self._exit = ExitStack()  # restores the module when the last user leaves

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the numerics for the time of the context. Re-entrant, also from several threads.

        When the last user leaves, the attention and experts implementation and every forward are restored. Raises
        PhaseError while another engine's numerics are installed on the module or on a part of it.
        """
        with self._lock:
            if self._num_users == 0:
                self._refuse_other_tree()
                with ExitStack() as entered:
                    entered.enter_context(self._held())
                    entered.enter_context(_uncompiled(self._tree))
                    self.code.note_forwards()
                    self._use_implementations(entered)
                    entered.enter_context(self.numerics.installed())
                    self.code.note_installed()
                    for part in self._tree:
                        if (own := vars(part).get(_CHECKPOINT)) is not None:
                            entered.callback(setattr, part, _CHECKPOINT, own)
                            setattr(part, _CHECKPOINT, self._checkpointing(own))
                    self._exit = entered.pop_all()
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._exit.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the module and the models inside it: two numerics would restore each other's implementations."""
        models = [part for part in self._tree if isinstance(part, PreTrainedModel)]
        with _holders_lock:
            if any(model in _holders for model in models):
                raise PhaseError(
                    f"{type(self.module).__name__} is in use by another engine: a module can be in the rollout phase, "
                    "or under the training_numerics, of one engine at a time. Leave that first, or share one engine"
                )
            _holders.update(dict.fromkeys(models, self))
        try:
            yield
        finally:
            with _holders_lock:
                for model in models:
                    _holders.pop(model, None)  # at the end of a process it may be gone

    def _refuse_other_tree(self) -> None:
        now = list(self.module.modules())
        if len(now) != len(self._tree) or any(a is not b for a, b in zip(now, self._tree, strict=True)):
            new = sorted({type(part).__name__ for part in set(now) ^ set(self._tree)})
            raise ValueError(
                f"the layers of {type(self.module).__name__} are others than when it was hosted ({', '.join(new)}): "
                "add and remove adapters before the engine is made, or make it anew"
            )

    def _use_implementations(self, entered: ExitStack) -> None:
        """Set the implementations in the configurations until `entered` ends, and other models' numerics that share one
        have ended. Raises PhaseError where those are not the same."""
        parameter, guarantee = first_weight(self.module.parameters()), self.numerics.guarantee
        path = guarantee.attention if guarantee else attention_path(parameter.device, parameter.dtype)
        for one in _configs(self.module):
            entered.enter_context(_ConfigInUse.by(one, (ATTENTION_NAMES[path], self._own_experts)))
        use_attention(self.module, ATTENTION_NAMES[path])
        if self._own_experts:
            for part in self._tree:
                if hasattr(part, "has_gate") and isinstance(config := getattr(part, "config", None), PretrainedConfig):
                    config._experts_implementation_internal = EXPERTS

    def _checkpointing(self, own: Callable[..., object]) -> Callable[..., object]:
        """Return the checkpoint function of a layer, which runs the layer again with these numerics, whenever it is.

        A backward pass runs it, and may come after the last user has left.
        """

        def checkpoint(run: Callable[..., object], *args: object, **kwargs: object) -> object:
            under_mode, keywords = self.numerics.around(run), carried()

            def again(*inputs: object, **named: object) -> object:
                with self.installed(), carrying(keywords):
                    return under_mode(*inputs, **named)

            return own(again, *args, **kwargs)

        return checkpoint


class _ConfigInUse:
    """A configuration whose implementations are set: how often, what for, and what it had before."""

    def __init__(self, config: PretrainedConfig, use: object) -> None:
        self.config, self.use, self.num_users = config, use, 0
        self.before = config._attn_implementation, config._experts_implementation

    @staticmethod
    @contextmanager
    def by(config: PretrainedConfig, use: object) -> Iterator[None]:
        """Count one more user, and restore the configuration when the last one leaves."""
        with _holders_lock:
            in_use = _configs_in_use.setdefault(id(config), _ConfigInUse(config, use))
            if in_use.use != use:
                raise PhaseError(
                    f"the module's {type(config).__name__} is shared with another engine's module that uses other "
                    f"numerics ({in_use.use}, not {use}): give each module a copy of its own (copy.deepcopy)"
                )
            in_use.num_users += 1
        try:
            yield
        finally:
            with _holders_lock:
                in_use.num_users -= 1
                if not in_use.num_users:
                    del _configs_in_use[id(config)]
                    _restore(config, *in_use.before)


@contextmanager
def _uncompiled(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Run parts that were compiled in place, or whose forward was, uncompiled; restores both when the context ends."""
    with ExitStack() as entered:
        for part in parts:
            own = vars(part)
            if (compiled := own.get(_COMPILED)) is not None:
                entered.callback(setattr, part, _COMPILED, compiled)
                setattr(part, _COMPILED, None)
            forward = own.get("forward")
            if (original := _without_compiler(forward)) is not forward:
                entered.callback(setattr, part, "forward", forward)
                del part.forward
                if original != part.forward:  # a forward of the instance's own was compiled
                    part.forward = original
        yield


def _without_compiler(function: Any) -> Any:
    """Return the function that torch.compile was given, and any other function as it is."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith(_COMPILER):
        if (function_inside := getattr(function, "__wrapped__", None)) is None:
            break
        function = function_inside
    return function


def use_attention(module: PreTrainedModel, name: str) -> None:
    """Set an attention implementation in the configurations of a module and of all modules in it that know it."""
    if own_attentions(module):
        module.config._attn_implementation_internal = name  # transformers has no setter for such a class
    for model in interfaced_models(module):
        model.set_attn_implementation(name)


@contextmanager
def restored_implementations(module: PreTrainedModel) -> Iterator[None]:
    """Restore the attention and experts implementation of a module and of all modules in it when the context ends."""
    with ExitStack() as entered:
        for config in _configs(module):
            entered.callback(_restore, config, config._attn_implementation, config._experts_implementation)
        yield


def _configs(module: PreTrainedModel) -> list[PretrainedConfig]:
    """List the configurations of a module and of all modules in it, each once."""
    found: dict[int, PretrainedConfig] = {}
    waiting = [getattr(part, "config", None) for part in module.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _restore(config: PretrainedConfig, attention: str | None, experts: str | None) -> None:
    # transformers' setters write these attributes, but refuse some values that a module may start with.
    config._attn_implementation_internal = attention
    config._experts_implementation_internal = experts
