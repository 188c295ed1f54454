"""The same-host hand-over: named shared memory on CPUs here, CUDA IPC in `cuda_ipc`; both ends in one file.

    sender                                     receiver
    pack bucket 0 into half 0
    describe it (JSON)  ------------------->   check, attach once, copy into the sink
    pack bucket 1 into half 1, meanwhile
    resume the generator, describe 1  <----->  reply: the copy of 0 is complete; copy 1
    pack bucket 2 into half 0, meanwhile

One segment serves every bucket of every update: its first touch costs more than all later copies. It holds a header of
one page, then the two halves. The header has a sequence number for each half, odd while the sender writes there; a
reader that finds another number than its description's, before or after copying, has not read that bucket.

The receiver trusts processes of its own user not to truncate a segment while it copies (that would be a SIGBUS).
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import SessionError, TransferFailed
from ..layout.bucket import ALIGNMENT, DEFAULT_BUCKET_BYTES, BucketPiece, byte_view, plan_buckets
from ..layout.json_values import is_count
from ..layout.sink import Sink
from ..manifest import Manifest, NamedTensors, TensorSpec
from ..workers import Workers
from .cuda_ipc import KIND as CUDA_IPC
from .cuda_ipc import receive_cuda
from .handover import copy_bytes, described, in_manifest_order, listed, raise_if_any, read_described, shown
from .segment import FILE_NAME, HEADER_BYTES, MAGIC, Packed, Segment, read_sequence, remove_stale_segments

KIND = "shm"
DEFAULT_FOLDER = Path("/dev/shm")


class SharedMemorySender:
    """Hand tensors to receivers on this host through one reused segment.

    The segment takes up to `bucket_bytes` and a page; a bucket is half of it, so that the next one is packed while the
    receiver copies (a fifth faster than taking turns, on two cores), by one thread at each end. `close` or the
    interpreter's exit unlinks the segment. The segment of a killed sender is unlinked by the next sender in the same
    folder: a sender holds a lock on its file, which the kernel drops with the process, whatever its pid and namespace.
    """

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES, folder: Path | str = DEFAULT_FOLDER) -> None:
        if bucket_bytes < 2 * ALIGNMENT:
            raise ValueError(f"bucket_bytes must be at least {2 * ALIGNMENT}, not {bucket_bytes}")
        self.bucket_bytes = bucket_bytes
        self.folder = Path(folder).absolute()
        self._segment: Segment | None = None
        self._sequence = 0  # even; never used twice, for neither half
        self._sending = False
        remove_stale_segments(self.folder)

    def buckets(self, tensors: NamedTensors, manifest: Manifest) -> Generator[dict[str, object], None, None]:
        """Pack the tensors bucket by bucket and yield each bucket's description.

        A description is valid until the generator is resumed: resume it after the receiver's reply. Tensors are drawn
        in the manifest's order by the calling thread, at most a bucket of them ahead, from any device. Raises
        ValueError if they are not the manifest's, and SessionError while another iteration of this sender is
        unfinished.
        """
        if self._sending:
            raise SessionError("this sender's previous update is not finished: close its generator first")
        self._sending = True
        specs = {spec.name: spec for spec in manifest.tensors}
        plans = plan_buckets(manifest.tensors, self.bucket_bytes // 2)
        half = -(-max((plan.num_bytes for plan in plans), default=0) // ALIGNMENT) * ALIGNMENT
        drawn = in_manifest_order(tensors, manifest)
        source = torch.empty(0, dtype=torch.uint8)  # the bytes of the last drawn tensor
        packing: Future[Packed] | None = None
        try:
            segment = self._reserve(half * min(2, len(plans)))
            with Workers(1, "pack") as worker:
                for plan in (*plans, None):
                    packed = packing.result() if packing else None
                    if plan is not None:
                        sources = []
                        for piece in plan.pieces:
                            if piece.tensor_offset == 0:
                                source = _written_bytes(next(drawn)[1])
                            sources.append(source[piece.tensor_offset : piece.tensor_offset + piece.num_bytes])
                        self._sequence += 2
                        packing = worker.submit(segment.pack, plan, sources, half, self._sequence)
                        del sources
                    if packed is not None:
                        yield self._describe(segment, packed, [specs[name] for name in packed.names], manifest)
            for _ in drawn:  # raises for a surplus tensor
                pass
        finally:
            if self._segment is not None:
                self._segment.invalidate()  # no description of this update is valid any longer
            self._sending = False

    def close(self) -> None:
        """Unlink the segment. Readers that still map it keep its memory until they drop it."""
        if self._segment is not None:
            self._segment.unlink()
            self._segment = None

    def _reserve(self, num_bytes: int) -> Segment:
        if self._segment is None or self._segment.data.numel() < num_bytes:
            self.close()
            self._segment = Segment(self.folder, num_bytes)
        return self._segment

    def _describe(
        self, segment: Segment, packed: Packed, specs: list[TensorSpec], manifest: Manifest
    ) -> dict[str, object]:
        fields = described(KIND, packed.index, specs, manifest)
        fields["path"] = str(segment.path)
        fields["size"] = HEADER_BYTES + segment.data.numel()
        fields["half"] = packed.half
        fields["sequence"] = packed.sequence
        fields["pieces"] = [[piece.tensor_offset, piece.bucket_offset, piece.num_bytes] for piece in packed.pieces]
        return fields


def _written_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, its pending writes done: the packing thread does not know the caller's stream."""
    source = byte_view(tensor)
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()
    return source


@dataclass(frozen=True)
class SharedBucket:
    """A checked description, consistent in itself."""

    file_name: str
    size: int  # bytes, header included
    half: int  # of the sequence number
    sequence: int
    specs: tuple[TensorSpec, ...]
    pieces: tuple[BucketPiece, ...]
    manifest: Manifest | None  # with the first bucket of an update


def read_description(description: Mapping[str, object], folder: Path = DEFAULT_FOLDER) -> SharedBucket:
    """Check a description without touching the file system. Raises ValueError listing every error."""
    problems: list[str] = []
    specs, manifest = read_described(description, KIND, {"path", "size", "half", "sequence", "pieces"}, problems)
    path, size, half, sequence = (description.get(key) for key in ("path", "size", "half", "sequence"))
    name = os.path.basename(path) if isinstance(path, str) else ""
    if path != str(folder / name) or not FILE_NAME.fullmatch(name):
        problems.append(f"path {shown(path)} is not a segment in {folder}")
    if not is_count(size) or size < HEADER_BYTES:
        problems.append(f"size {shown(size)} is not at least {HEADER_BYTES}")
        size = HEADER_BYTES
    if not is_count(half, 2):
        problems.append(f"half {shown(half)} is neither 0 nor 1")
    if not is_count(sequence) or sequence % 2:
        problems.append(f"sequence {shown(sequence)} is not an even count")
    ranges = description.get("pieces")
    pieces: list[BucketPiece] = []
    if not isinstance(ranges, list) or len(ranges) != len(specs):
        problems.append(f"pieces must be a list of {len(specs)}, one for each tensor")
    else:
        for spec, values in zip(specs, ranges, strict=True):
            if not isinstance(values, list) or len(values) != 3 or not all(is_count(value) for value in values):
                problems.append(f"{spec.name}: a piece is three counts")
                continue
            pieces.append(BucketPiece(spec.name, *values))
            problems += _piece_problems(spec, pieces[-1], size - HEADER_BYTES)
    problems += _overlaps(pieces)
    raise_if_any(problems, "description of a shared-memory bucket")
    assert is_count(half) and is_count(sequence)
    return SharedBucket(name, size, half, sequence, specs, tuple(pieces), manifest)


def _piece_problems(spec: TensorSpec, piece: BucketPiece, bucket_bytes: int) -> list[str]:
    problems = []
    end = piece.tensor_offset + piece.num_bytes
    where = f"{spec.name}: bytes {piece.tensor_offset} to {end}"
    if end > spec.num_bytes:
        problems.append(f"{where} of a tensor of {spec.num_bytes}")
    if piece.tensor_offset % ALIGNMENT or (end % ALIGNMENT and end != spec.num_bytes):
        problems.append(f"{where} do not lie on multiples of {ALIGNMENT}")
    if piece.num_bytes == 0 and spec.num_bytes:
        problems.append(f"{where}: empty, but the tensor is not")
    if piece.bucket_offset + piece.num_bytes > bucket_bytes:
        stop = piece.bucket_offset + piece.num_bytes
        problems.append(f"{spec.name}: bytes {piece.bucket_offset} to {stop} of a bucket of {bucket_bytes}")
    if piece.bucket_offset % ALIGNMENT:
        problems.append(f"{spec.name}: bucket offset {piece.bucket_offset} is no multiple of {ALIGNMENT}")
    return problems


def _overlaps(pieces: list[BucketPiece]) -> list[str]:
    placed = sorted((piece for piece in pieces if piece.num_bytes), key=lambda piece: piece.bucket_offset)
    return [
        f"{one.name} and {other.name} overlap in the bucket"
        for one, other in itertools.pairwise(placed)
        if one.bucket_offset + one.num_bytes > other.bucket_offset
    ]


class TensorReceiver:
    """Copy described buckets into a sink, from shared memory in `folder` or from CUDA IPC handles.

    The last segment stays attached, so that all buckets of a sender cost one attachment.
    """

    def __init__(self, folder: Path | str = DEFAULT_FOLDER) -> None:
        self.folder = Path(folder).absolute()
        self._attached: tuple[str, int, Tensor, mmap.mmap] | None = None  # name, inode, all bytes, their map

    def receive(self, description: Mapping[str, object], sink: Sink) -> tuple[TensorSpec, ...]:
        """Copy one bucket; the copy is complete when this returns. Returns the tensors that end in it.

        `sink.expect` is called with the whole manifest at the first bucket of an update, then with the tensors that
        start in each bucket. Raises ValueError listing every error in the description, before any memory is touched,
        and TransferFailed if the segment no longer exists or no longer holds this bucket; the sink then has to roll
        back its writes.
        """
        if not isinstance(description, Mapping):
            raise ValueError(f"a description is a JSON object, not {shown(description)}")
        kind = description.get("kind")
        if kind == KIND:
            return self._receive_shared(read_description(description, self.folder), sink)
        if kind == CUDA_IPC:
            return receive_cuda(description, sink)
        raise ValueError(f"kind {shown(kind)} is neither {KIND!r} nor {CUDA_IPC!r}")

    def close(self) -> None:
        """Detach from the segment."""
        self._attached = None

    def _receive_shared(self, bucket: SharedBucket, sink: Sink) -> tuple[TensorSpec, ...]:
        data, header = self._attach(bucket)
        _check_sequence(header, bucket, "before")
        starting = [spec for spec, piece in zip(bucket.specs, bucket.pieces, strict=True) if piece.tensor_offset == 0]
        sink.expect(bucket.manifest.tensors if bucket.manifest is not None else starting)
        for piece in bucket.pieces:
            start = HEADER_BYTES + piece.bucket_offset
            part = data[start : start + piece.num_bytes]
            destination = sink.destination(piece.name, piece.tensor_offset, piece.num_bytes)
            if destination is None:
                sink.write(piece.name, piece.tensor_offset, part)
            else:
                copy_bytes(destination, part)
        _check_sequence(header, bucket, "after")
        pairs = zip(bucket.specs, bucket.pieces, strict=True)
        return tuple(spec for spec, piece in pairs if piece.tensor_offset + piece.num_bytes == spec.num_bytes)

    def _attach(self, bucket: SharedBucket) -> tuple[Tensor, mmap.mmap]:
        """Return the bytes of the bucket's segment and their map, checked each time, mapped at the first."""
        path = self.folder / bucket.file_name
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise TransferFailed(f"{path} is gone: its sender closed it or ended ({_where(bucket)})") from error
        except OSError as error:  # a link, or not ours to open
            raise ValueError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(file)
            problems = []
            if not stat.S_ISREG(found.st_mode):
                problems.append("it is not a regular file")
            if found.st_uid != os.getuid():
                problems.append(f"it belongs to user {found.st_uid}")
            if found.st_mode & 0o077:
                problems.append(f"others may open it (mode {stat.S_IMODE(found.st_mode):o})")
            if found.st_size < bucket.size:
                problems.append(f"it has {found.st_size} bytes, not {bucket.size}")
            raise_if_any(problems, str(path))
            kept = self._attached
            if kept is None or kept[:2] != (bucket.file_name, found.st_ino) or len(kept[3]) < bucket.size:
                kept = None
                self._attached = None  # dropped before the next one is mapped
                mapped = mmap.mmap(file, found.st_size)
                if mapped[: len(MAGIC)] != MAGIC:
                    raise ValueError(f"{path} is not a segment of a sender")
                whole = torch.frombuffer(mapped, dtype=torch.uint8)
                self._attached = kept = (bucket.file_name, found.st_ino, whole, mapped)
        finally:
            os.close(file)
        return kept[2], kept[3]


def _check_sequence(header: mmap.mmap, bucket: SharedBucket, when: str) -> None:
    # The number is aligned and has eight bytes. Sender and receiver alternate through the request and its reply, which
    # orders their accesses; the number detects a sender that does not wait for the reply.
    found = read_sequence(header, bucket.half)
    if found != bucket.sequence:
        state = "being written" if found % 2 else "another bucket's"
        raise TransferFailed(
            f"{when} copying, the segment is {state}: sequence {found}, described {bucket.sequence} ({_where(bucket)})"
        )


def _where(bucket: SharedBucket) -> str:
    return f"tensors {listed([spec.name for spec in bucket.specs][:3])}" if bucket.specs else "no tensors"
