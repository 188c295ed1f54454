"""Transport of weights through memory of this host: shared memory, or CUDA IPC handles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..layout.bucket import DEFAULT_BUCKET_BYTES
from ..manifest import Manifest, NamedTensors
from ..same_host.cuda_ipc import CudaIpcSender
from ..same_host.shared_memory import SharedMemorySender
from ..target import Target
from .transport import Sent, on_all, raise_failures


class TensorTransport:
    """Send weights through memory of this host, bucket by bucket. Each target answers when its copy is complete."""

    takes_pieces = True

    def __init__(
        self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, folder: Path | str = "/dev/shm", cuda: bool = False
    ) -> None:
        """Make the sender. cuda: send CUDA tensors by IPC handles, instead of copies in shared memory under
        `folder`."""
        self._sender = CudaIpcSender(bucket_bytes) if cuda else SharedMemorySender(bucket_bytes, folder)

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Do nothing: memory is shared with the tensors."""

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Send the tensors bucket by bucket; see `Transport.send`."""
        self.send_as(None, targets, manifest, tensors, timeout_s)
        return Sent(manifest.num_bytes)

    def send_as(
        self, load_format: str | None, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors,
        timeout_s: float, **options: object,
    ) -> None:  # fmt: skip
        """Send buckets to receivers that read them as `load_format`."""
        buckets = self._sender.buckets(tensors, manifest)
        try:
            for description in buckets:

                def update(target: Target, description: dict[str, object] = description) -> object:
                    return target.call(
                        "update_weights_from_tensor", timeout_s=timeout_s, descriptions=[description],
                        load_format=load_format, **options,
                    )  # fmt: skip

                raise_failures(on_all(targets, update))
        finally:
            buckets.close()

    def committed(self) -> None:
        """Do nothing: no state is kept."""

    def rejected(self) -> None:
        """Do nothing: no state is kept."""

    def close(self) -> None:
        """Unlink the segment."""
        self._sender.close()
