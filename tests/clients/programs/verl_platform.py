"""A platform of processors for verl, which has GPUs and NPUs alone: `VERL_PLATFORM=cpu`, with Ray told of some GPUs."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

_BOTH = "cpu:gloo,cpu:gloo"  # verl's backends of the device and of the host


class _Device(types.ModuleType):
    """What verl asks of `torch.cuda`, for processors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = staticmethod(lambda *_: None)
    memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    max_memory_allocated = max_memory_reserved = staticmethod(lambda *_: 0)
    mem_get_info = staticmethod(lambda *_: (1 << 33, 1 << 34))
    current_device = get_device_name = staticmethod(lambda *_: "cpu")
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)


@PlatformRegistry.register(platform="cpu")
class ProcessorPlatform(PlatformBase):
    """Processors that Ray counts as GPUs."""

    device_name = vendor_name = "cpu"
    device_module = _Device("processors")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = dist.init_process_group


def _init(backend: str | None = None, *arguments: Any, **keywords: Any) -> None:
    _init_process_group("gloo" if backend == _BOTH else backend, *arguments, **keywords)


dist.init_process_group = _init
