"""Turn a decode step over fixed memory into a function that runs it again: a plain call or a CUDA graph.

`cpu_graphs.py` has the recorder for a CPU.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..model.operations.fused_layers import has_hooks

logger = logging.getLogger(__name__)

_NUM_WARM_UPS = 2  # before a capture: compiles kernels and allocates the libraries' workspaces

_aten = torch.ops.aten
_WRITES = {_aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_UNKNOWN_BEFORE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations without these tags that read data on the host all the same: in inference mode a dispatch mode sees them
# whole, not their parts. `if x.any()` is the first.
_UNTAGGED = {_aten.is_nonzero.default, _aten.where.default, _aten.nonzero_numpy.default, _aten.narrow.Tensor,
             _aten.repeat_interleave.self_Tensor, _aten.tensor_split.tensor_indices_or_sections}  # fmt: skip
# Methods that read a CPU tensor's memory, for which torch dispatches nothing that tells.
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__, Tensor.__repr__}
_MAKES_OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}  # reads tensors in a list

Run = Callable[[], Sequence[Tensor]]


class Recorder(Protocol):
    """The interface of a recorder: it turns a step over fixed memory into a function that runs it again."""

    def record(self, run: Run) -> Run:
        """Return a function with the effect of `run`, whose results the next call may overwrite.

        May call `run` several times. The step's effect is guaranteed only after a call of the returned function.
        """
        ...


class PlainCalls:
    """A recorder that returns the plain call, for modules whose steps cannot be recorded."""

    def record(self, run: Run) -> Run:
        return run


class HookWatch:
    """A watch for hooks on modules. It looks at all of them only after a hook was registered anywhere, or while it has
    found one: a look at some hundred modules takes as long as planning a step."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._num_registered = -1
        self._has_some = True

    def __call__(self) -> bool:
        """Return whether there are any now."""
        registered = RemovableHandle.next_id  # grows with every registration of a hook
        if self._has_some or registered != self._num_registered:
            self._num_registered, self._has_some = registered, has_hooks(self._modules)
        return self._has_some


class PlainWhileHooked:
    """A recorder that uses another one, and makes plain calls while a module has hooks: a replay would call none."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        self._recorder, self._module = recorder, module

    def record(self, run: Run) -> Run:
        has_hooks_now = HookWatch(list(self._module.modules()))
        recorded = None if has_hooks_now() else self._recorder.record(run)

        def step() -> Sequence[Tensor]:
            nonlocal recorded
            if has_hooks_now():
                return run()
            if recorded is None:
                recorded = self._recorder.record(run)
            return recorded()

        return step


def depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation of torch has results whose number, or effect on the host, depends on the data."""
    takes_rows = func is _aten.index.Tensor and not _has_mask(args[1])
    return func in _UNTAGGED or (not _UNKNOWN_BEFORE.isdisjoint(func.tags) and not takes_rows)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    """Return whether a mask is among the indices: then how many elements there are depends on the data."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class UndispatchedReads(TorchFunctionMode):
    """A function mode that notes the first call that reads a tensor's data and that no dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        if func in _READS or (func in _MAKES_OF_NUMBERS and any(map(_holds_tensors, given))):
            self.first = self.first or func.__name__
        return func(*args, **(kwargs or {}))


def _holds_tensors(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, Tensor) or _holds_tensors(v) for v in value)


class _HostReads(TorchDispatchMode):
    """A dispatch mode that notes the first operation for which the host waits for a device's results."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        came = isinstance(out, Tensor) and out.is_cpu and any(isinstance(a, Tensor) and a.is_cuda for a in args)
        counts_mask = func.overloadpacket in _WRITES and _has_mask(args[1])  # torch has no tag for these
        if came or counts_mask or depends_on_data(func, args):
            self.first = self.first or str(func)
        return out


def first_host_read(run: Run) -> str | None:
    """Run a step and return the first operation of torch for which the host reads a tensor's data, or None."""
    with UndispatchedReads() as calls, _HostReads() as reads:
        run()
    return reads.first or calls.first


class CUDAGraphs:
    """A recorder that captures CUDA graphs. They run one after another and leave their results in our buffers, so all
    that live share one memory pool. A step in which the host reads data stays a plain call: a capture of it fails, and
    takes the process with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._warned = False

    def record(self, run: Run) -> Run:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS - 1):
                run()
            read = first_host_read(run)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        if read is not None:
            if not self._warned:
                logger.warning("decode steps are not recorded: the host waits for %s in the module's code", read)
            self._warned = True
            return run
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch's allocator refuses a pool whose last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        # "thread_local": other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return results

        return replay
