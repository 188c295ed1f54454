"""A rollout engine that lives inside the trainer's torchrun ranks and samples with the model being trained.

The names below are imported when they are first used: `import lockstep` itself imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .integration.service import RolloutService as RolloutService
    from .integration.service_config import ServiceConfig as ServiceConfig
    from .rollout.completion import Completion as Completion
    from .rollout.config import EngineConfig as EngineConfig
    from .rollout.engine import Engine as Engine
    from .rollout.request_options import RequestOptions as RequestOptions
    from .rollout.sampling_params import SamplingParams as SamplingParams

    __version__: str

_MODULES = {
    "Completion": "rollout.completion",
    "Engine": "rollout.engine",
    "EngineConfig": "rollout.config",
    "RequestOptions": "rollout.request_options",
    "RolloutService": "integration.service",
    "SamplingParams": "rollout.sampling_params",
    "ServiceConfig": "integration.service_config",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "RequestOptions",
    "RolloutService",
    "SamplingParams",
    "ServiceConfig",
]


def __getattr__(name: str) -> object:
    """Import a public name (PEP 562). Raises AttributeError for any other."""
    if name == "__version__":
        return import_module(".integration.version", __name__).version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
