"""Weight sync against the machine's own speed: every path, from a trainer's process to an engine in another.

All paths push a Qwen3-shaped bfloat16 model of random weights through the service's verbs, each repetition in turns
with the raw copies, so that other work on the machine affects all of them. Rates are medians, in 1e9 bytes of weights
a second; a bar's value is the median of each repetition's own ratio.

plain is pause, flush, begin with undo="none", the buckets, end, continue, and no digest at either end. transaction is
the same with undo="tensors", digest="now", the sender's digests verified (they are taken before the clock starts) and
the undo freed. After every push the model digests of both ends must agree.
raw_broadcast: all bytes in one gloo broadcast. raw_shm: a copy of all bytes into warm shared memory and one out of it,
one after the other. raw_hashlib: hashlib over the same tensors on two threads; checksum: the checker's SHA-256 sums
of the engine's tensors, as `weights_checker` reports its time; verify: the tensor roots that a transaction compares.
memcpy: to warm private memory. in place: an engine in the sender's process that aliases its weights, digest="later";
digest_s is the time of that digest when it is computed.
A delta changes single bits of 1 % or 5 % of the elements, and its ratio is the bytes it moves to those of the weights.

peak_extra_bytes: by how much the first plain push of a path raises the high-water mark of resident memory (VmHWM) over
the resident memory before it, in each process; total counts shared memory that both map once. A delta's sender keeps
the weights that the engine has, delta_base_bytes more; its peak is that of the first push of 5 % after a full one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.sha256.tiles import is_native
from ...rollout.engine import Engine
from ...weight_sync.digests.model_digest import model_root, tensor_roots
from ...weight_sync.layout.bucket import word_view
from ...weight_sync.manifest import Manifest
from ...weight_sync.transports.delta import DeltaTransport
from ...weight_sync.transports.disk import DiskTransport
from ...weight_sync.transports.group import DistributedTransport
from ...weight_sync.transports.same_host import TensorTransport
from ...weight_sync.transports.transport import Sent, Transport
from ..push.adapters.trainer_tensors import trainer_specs, trainer_tensors
from ..service import RolloutService
from .parts.budget import Budget, add_budget_argument
from .parts.ports import free_ports
from .parts.presets import PRESETS
from .parts.sync_peer import ENGINE, Peer
from .parts.sync_raw import RawEnd, flat_model, memory, restart_peak
from .parts.sync_report import DENSITIES, Sample, brief, key, report

TIMEOUT_S = 120.0  # for each wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="medium", help=f"{', '.join(PRESETS)} (random weights) or a model folder")
    parser.add_argument("--repetitions", type=int, default=5, help="the median counts")
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, in both processes")
    parser.add_argument("--folder", type=Path, help="where the disk path writes; default: the temporary folder")
    parser.add_argument("--chaos", type=int, metavar="N", help="instead: N random schedules of gloo groups, for hangs")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the changes, or of the schedules")
    add_budget_argument(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure, and return the report. Raises ValueError for invalid options, and RuntimeError where the two
    ends' digests differ.
    """
    if options.chaos is not None:
        from .parts.chaos import run_chaos

        return run_chaos(options.chaos, options.seed)
    if options.repetitions < 1 or options.threads < 1:
        raise ValueError("--repetitions and --threads must be at least 1")
    budget = Budget(options.max_seconds)
    before, started = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(options.threads)
    try:
        with ExitStack() as stack:
            bench = stack.enter_context(_bench(options))
            peaks = bench.warm_up()
            samples = []
            for repetition in budget.rounds(options.repetitions):
                samples.append(bench.repetition())
                print(f"repetition {repetition + 1}/{options.repetitions}: {brief(samples[-1])}",
                      file=sys.stderr, flush=True)  # fmt: skip
    finally:
        torch.set_num_threads(before)
    settings = {
        "model": options.preset,
        "bytes": bench.num_bytes,
        "num_tensors": len(bench.specs),
        "bucket_bytes": bench.bucket_bytes,
        "num_repetitions": len(samples),
        "threads": options.threads,
        "native_digests": is_native(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "seconds": round(time.monotonic() - started, 1),
    }
    return {**settings, **report(samples, peaks, bench.num_bytes, bench.bucket_bytes)}


@contextmanager
def _bench(options: argparse.Namespace) -> Iterator[SyncBench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-bench-")))
        peer = Peer(options.preset, options.threads, folder)
        stack.callback(peer.close)
        disk = options.folder or folder / "updates"
        bench = SyncBench(options.preset, peer, int(options.bucket_mib * (1 << 20)), disk, options.seed)
        stack.callback(bench.close)
        yield bench


class SyncBench:
    """The trainer's process: its model, its transports, and its side of the raw copies."""

    def __init__(self, preset: str, peer: Peer, bucket_bytes: int, folder: Path, seed: int) -> None:
        is_native()  # compiles at its first use
        self.bucket_bytes = bucket_bytes
        self._peer = peer
        self._model, block = flat_model(preset)
        self.specs = trainer_specs(self._model)
        self.num_bytes = sum(spec.num_bytes for spec in self.specs)
        self._service = RolloutService(Engine(self._model, ENGINE))  # it aliases the trainer's weights
        self._raw = RawEnd(self._model, block)
        self._random = torch.Generator().manual_seed(seed)
        self._version = 0
        self._transports: dict[str, Transport] = {
            "distributed": DistributedTransport(bucket_bytes=bucket_bytes),
            "tensor": TensorTransport(bucket_bytes=bucket_bytes),
            "disk": DiskTransport(folder),
            "delta": DeltaTransport(TensorTransport(bucket_bytes=bucket_bytes), check="touched"),
        }

    def warm_up(self) -> dict[str, dict[str, int]]:
        """Run each measurement once; returns the peaks of memory by path."""
        peaks = {}
        for path in ("distributed", "tensor", "disk"):
            peaks[path] = self._peak_of(partial(self.push, self._transports[path], "plain"))
        self.push(self._transports["delta"], "plain")  # the base
        self._change(0.05)
        peaks["delta"] = self._peak_of(lambda: self.push(self._transports["delta"], "plain"))
        self._join_raw()
        self.repetition()
        return peaks

    def repetition(self) -> Sample:
        """Measure the seconds of each item once."""
        sample: Sample = {"raw_broadcast": self._raw_broadcast()}
        for kind in ("plain", "transaction"):
            sample[key("distributed", kind)] = self._changed_push("distributed", kind)[0]
        sample["raw_shm"] = self._raw.write_segment() + self._ask("raw_read")
        for kind in ("plain", "transaction"):
            sample[key("tensor", kind)] = self._changed_push("tensor", kind)[0]
        sample["memcpy"], sample["raw_hashlib"] = self._ask("raw_memcpy"), self._ask("raw_hash")
        sample["checksum"] = float(self._call("weights_checker", action="checksum")["seconds"])
        started = time.perf_counter()
        self._ask("model_digest")
        sample["verify"] = time.perf_counter() - started
        self._changed_push("disk", "plain")  # else the first one would include the time for new pages of the file cache
        for kind in ("plain", "transaction"):
            sample[key("disk", kind)] = self._changed_push("disk", kind)[0]
        self._transports["delta"].rejected()  # the engine has weights that other transports pushed
        self._changed_push("delta", "plain")
        for name, density in DENSITIES.items():
            for kind in ("plain", "transaction"):
                sample[key(name, kind)], sent = self._changed_push("delta", kind, density)
            sample[f"{name}_ratio"] = sent.num_bytes / self.num_bytes
        return {**sample, **self._in_place()}

    def push(self, transport: Transport, kind: str) -> tuple[float, Sent]:
        """Push the model to the engine; returns the seconds from pause to continue, and the sent parts."""
        self._version += 1
        tensors = list(trainer_tensors(self._model))
        manifest = Manifest(str(self._version), self.specs)
        roots = tensor_roots(tensors)
        digests = {name: root.hex() for name, root in roots.items()}
        undo, digest = ("none", "later") if kind == "plain" else ("tensors", "now")
        started = time.perf_counter()
        self._call("pause_generation", mode="retract")
        self._call("flush_cache")
        self._call("begin_weight_update", weight_version=manifest.version, undo=undo, digest=digest)
        sent = transport.send([self._peer], manifest, tensors, TIMEOUT_S)
        if kind == "transaction":
            self._call("verify_weight_update", digests=digests)
        self._call("end_weight_update")
        if undo != "none":
            self._call("release_weight_undo")
        self._call("continue_generation")
        seconds = time.perf_counter() - started
        transport.committed()
        ours, theirs = model_root(roots.items()), self._call("finish_digest")["result"]
        if ours != theirs:
            raise RuntimeError(f"version {manifest.version} is {theirs} in the engine, {ours} was sent")
        return seconds, sent

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._service.close()

    # -- parts ------------------------------------------------------------------------------------------------------

    def _changed_push(self, name: str, kind: str, density: float = 1e-5) -> tuple[float, Sent]:
        self._change(density)
        return self.push(self._transports[name], kind)

    def _change(self, density: float) -> None:
        """Flip the lowest bit of about that share of every tensor's elements."""
        for parameter in self._model.parameters():
            words = word_view(parameter.detach()).reshape(-1)
            positions = _random_positions(len(words), density, self._random)
            words[positions] ^= 1

    def _in_place(self) -> Sample:
        with self._service.optimizer_step():
            self._change(1e-5)
        started = time.perf_counter()
        self._service.commit_in_place(str(self._version), source=self._model.named_parameters(), digest="later")
        committed = time.perf_counter()
        self._service.finish_digest()
        return {"in_place": committed - started, "digest": time.perf_counter() - committed}

    def _raw_broadcast(self) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self._ask, "raw_broadcast")
            self._raw.broadcast()
            receiving.result()
        return time.perf_counter() - started

    def _join_raw(self) -> None:
        (port,), path = free_ports(1), f"/dev/shm/lockstep-bench-{uuid.uuid4().hex}"
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self._ask, "raw_join", port=port, rank=1, limit_s=TIMEOUT_S)
            self._raw.join(port, 0, TIMEOUT_S)
            joining.result()
        try:
            self._raw.attach(path, create=True)
            self._ask("raw_attach", path=path)
        finally:
            Path(path).unlink(missing_ok=True)

    def _peak_of(self, action: Callable[[], object]) -> dict[str, int]:
        ours, theirs = restart_peak(), self._ask("raw_restart_peak")
        action()
        ends = (ours, memory()), (theirs, self._ask("raw_memory"))
        extra = [after["peak"] - before["resident"] for before, after in ends]
        shared = min(max(0, after["shared"] - before["shared"]) for before, after in ends)
        return {"sender": extra[0], "receiver": extra[1], "total": sum(extra) - shared}

    def _ask(self, verb: str, **arguments: object) -> Any:
        return self._call(verb, **arguments)["result"]

    def _call(self, verb: str, **arguments: object) -> dict[str, Any]:
        return self._peer.call(verb, timeout_s=TIMEOUT_S, **arguments)


def _random_positions(length: int, density: float, generator: torch.Generator) -> Tensor:
    """Draw about density * length distinct numbers below `length`, int64, ascending."""
    wanted = density * length
    gaps = torch.empty(int(wanted + 6 * wanted**0.5 + 10), dtype=torch.float64).geometric_(density, generator=generator)
    positions = gaps.cumsum(0).long() - 1
    return positions[positions < length]
