"""Transport of weights through a folder that sender and targets share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..disk.claims import claimed_folder, remove_leftovers
from ..disk.folder import save_folder
from ..manifest import Manifest, NamedTensors
from ..target import Target
from .transport import Sent, on_all, raise_failures


class DiskTransport:
    """Send weights as a folder of safetensors that every target reads. The folder is removed afterwards, or by the
    next sender there if this process is killed."""

    takes_pieces = False

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        remove_leftovers(self._folder)

    def prepare(self, targets: Sequence[Target], timeout_s: float) -> None:
        """Do nothing: a folder is written with the tensors."""

    def send(self, targets: Sequence[Target], manifest: Manifest, tensors: NamedTensors, timeout_s: float) -> Sent:
        """Save a folder and let every target read it; see `Transport.send`."""
        with self.new_folder() as path:
            save_folder(path, tensors, manifest.version)
            read_from(path, targets, timeout_s)
        return Sent(manifest.num_bytes)

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Yield a free path, and remove the folder there afterwards."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with claimed_folder(self._folder / f"update-{uuid.uuid4().hex[:12]}") as path:
            yield path / "weights"

    def committed(self) -> None:
        """Do nothing: no state is kept."""

    def rejected(self) -> None:
        """Do nothing: no state is kept."""

    def close(self) -> None:
        """Do nothing: no state is kept."""


def read_from(path: Path, targets: Sequence[Target], timeout_s: float, **options: object) -> None:
    """Let every target read a folder. Raises TargetError, or TargetsFailed for several."""

    def read(target: Target) -> object:
        # The whole session is verified at its end; the folder's digests would be the same.
        return target.call(
            "update_weights_from_disk", timeout_s=timeout_s, model_path=str(path), verify=False, **options
        )

    raise_failures(on_all(targets, read))
