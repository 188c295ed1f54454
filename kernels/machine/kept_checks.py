"""Results of start-up checks, kept on disk: a second process of the same machine, code and settings reads them.

A result is a small JSON file in the folder of compiled kernels, under a name that is a digest of everything that the
result follows from. The caller names the subject of its check; this file adds the machine (processor, compiler,
environment), the versions of the libraries, and the bytes of this package's own code. A folder or file that another
user owns or can write to is not used. `LOCKSTEP_KEPT_CHECKS=0` switches the keeping off: each process checks anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import native
from .cache_folder import NoHome, UnsafeCache, cache_folder, check_owner, make_folder, remove_abandoned
from .switches import is_on

logger = logging.getLogger(__name__)

_PACKAGE = native.KERNELS.parent
_ROOMS = ("kernels", "rollout")  # the checked code and the checks are in these
# Variables that choose the instructions of libraries and of our kernels, or the operations.
_PREFIXES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "OMP_")
_NAMES = ("LOCKSTEP_MAX_ISA", "LOCKSTEP_NATIVE", "LOCKSTEP_TRITON", "TRITON_INTERPRET")


def kept(kind: str, subject: Iterable[object], names: Collection[str]) -> dict[str, Any] | None:
    """Return the value that `keep` was given for an equal subject on an equal machine, or None.

    subject: values whose repr is equal exactly where the checked thing is; names: the fields of such a value.
    """
    path = _path(kind, subject)
    if path is None or not path.exists():
        return None
    try:
        check_owner(path.parent)
        check_owner(path)
        value: dict[str, Any] = json.loads(path.read_bytes())
        if not isinstance(value, dict) or set(value) != set(names):
            raise ValueError("it is damaged")
    except (UnsafeCache, OSError, ValueError) as error:  # of JSON, too
        logger.warning("the kept check %s is not used: %s", path, error)
        return None
    return value


def keep(kind: str, subject: Iterable[object], value: Mapping[str, object]) -> None:
    """Write a value for `kept`. A folder that cannot be written is no error: the next process checks anew."""
    path = _path(kind, subject)
    if path is None:
        return
    try:
        make_folder(path.parent)
        remove_abandoned(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as work:
            written = Path(work) / "value"
            written.write_text(json.dumps(value))
            os.chmod(written, 0o644)  # whatever the umask allows others
            os.replace(written, path)  # atomic: another process sees the whole file or none
    except (UnsafeCache, OSError) as error:
        logger.warning("the check %s is not kept: %s", path.name, error)


def _path(kind: str, subject: Iterable[object]) -> Path | None:
    """Return the path of a value; None where checks are not kept."""
    if not is_on("LOCKSTEP_KEPT_CHECKS"):
        return None
    try:
        folder = cache_folder(os.environ)
    except NoHome:
        return None
    parts = [*_machine(), *map(repr, subject)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return folder / f"{kind}-{digest}.json"


def _machine() -> list[str]:
    """Describe what numbers follow from beside the subject."""
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items())
                 if name in _NAMES or name.startswith(_PREFIXES)]  # fmt: skip
    transformers = sys.modules.get("transformers")  # not imported for its version
    return [
        *variables, native.processor(), _compiler(), sys.version, torch.__version__,
        getattr(transformers, "__version__", ""), str(torch.get_num_threads()), torch.get_float32_matmul_precision(),
        str(torch.backends.mkldnn.enabled), str(torch.are_deterministic_algorithms_enabled()), package_digest(),
    ]  # fmt: skip


def _compiler() -> str:
    try:
        compiler = native.find_compiler(os.environ)
        return "\0".join([*compiler[1:], native.compiler_version(compiler)])
    except native.NativeUnavailable as reason:
        return str(reason)


@cache
def package_digest() -> str:
    """Return a digest of the code of kernels and rollout, and of the paths in it."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for folder, _, names in sorted(os.walk(_PACKAGE / room)):
            for name in sorted(names):
                if name.endswith((".py", ".cpp", ".h")):
                    file = Path(folder, name)
                    digest.update(f"{file.relative_to(_PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
