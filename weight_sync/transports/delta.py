"""Transport of changed weights only, over any of the other transports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..delta.apply import Check
from ..delta.chunk import DeltaChunk, DeltaStats, stats_by_tensor
from ..delta.encode import encode_delta
from ..delta.stream import pack_chunks, save_delta
from ..layout.bucket import byte_view
from ..manifest import Manifest, NamedTensors, TensorSpec
from ..target import Target
from .disk import DiskTransport, read_from
from .group import DistributedTransport
from .same_host import TensorTransport
from .transport import Sent


class DeltaTransport:
    """Send only the elements that changed since the last committed push, over another transport. The first push is
    sent in full.

    It keeps a copy of the targets' weights in host memory.
    """

    takes_pieces = False

    def __init__(self, inner: DistributedTransport | TensorTransport | DiskTransport, *, check: Check = "pre") -> None:
        """Wrap a transport. check: how closely targets check the bytes that they hold; "touched" is enough where the
        result is verified."""
        self._inner = inner
        self._check = check
        self._base: dict[str, Tensor] = {}  # each push overwrites it as it goes; whole where `_holders` is not empty
        self._holders: tuple[str, ...] = ()  # names of the targets that have the base
        self._sending_to: tuple[str, ...] = ()

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Prepare the other transport."""
        self._inner.prepare(targets, timeout_s)

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Send the difference to the base, or everything; see `Transport.send`."""
        holders, self._holders = self._holders, ()
        self._sending_to = tuple(target.name for target in targets)
        if holders != self._sending_to:
            return self._inner.send(targets, manifest, self._keeping(tensors), timeout_s)
        chunks = [self._kept(chunk) for chunk in self._encode(tensors)]
        stats = sum(stats_by_tensor(chunk.header for chunk in chunks).values(), DeltaStats())
        if isinstance(self._inner, DiskTransport):
            with self._inner.new_folder() as path:
                save_delta(path, None, manifest.version, chunks)
                read_from(path, targets, timeout_s, delta_check=self._check)
        else:
            named = [(f"delta {index}", buffer) for index, buffer in enumerate(pack_chunks(chunks))]
            packed = Manifest(manifest.version, tuple(TensorSpec.of(name, buffer) for name, buffer in named))
            self._inner.send_as("delta", targets, packed, named, timeout_s, delta_check=self._check)
        return Sent(stats.bytes_moved, stats.density)

    def committed(self) -> None:
        """Make the last sent weights the base of the next delta."""
        self._holders = self._sending_to

    def rejected(self) -> None:
        """Send the next push in full: it repairs targets whose weights are not as expected."""
        self._holders = ()

    def _keeping(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as copies in the base, in the memory of the previous base where they fit."""
        before, self._base = self._base, {}
        for name, tensor in tensors:
            held = before.get(name)
            if held is None or TensorSpec.of(name, held) != TensorSpec.of(name, tensor):
                held = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._base[name] = held.copy_(tensor.detach())
            yield name, held

    def _encode(self, tensors: NamedTensors) -> Iterator[DeltaChunk]:
        """Encode chunks against the base. The base takes on each tensor after it is encoded."""

        def passing() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                on_host = tensor.detach().cpu()
                yield name, on_host
                held = self._base.get(name)
                if held is not None and TensorSpec.of(name, held) == TensorSpec.of(name, on_host):
                    held.copy_(on_host)  # else the encoder raises, after it has listed all tensors that do not fit

        return encode_delta(self._base, passing(), chunk_digests=self._check != "touched")

    def _kept(self, chunk: DeltaChunk) -> DeltaChunk:
        """Return the chunk without the trainer's memory, for sending after the tensor was released."""
        header = chunk.header
        if header.kind != "full":
            return chunk
        held = byte_view(self._base[header.name])
        return DeltaChunk(header, held[header.offset : header.offset + header.num_bytes])

    def close(self) -> None:
        """Forget the base."""
        self._base, self._holders = {}, ()
        self._inner.close()
