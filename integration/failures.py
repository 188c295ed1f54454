"""Failures that a program reports in one line: files that cannot be written or read, lost engines, failures of other
ranks."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .one_line import in_one_line

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
RESUME = "start the same job with --resume, which continues from the newest checkpoint"


class FileFailed(OSError):
    """A file that cannot be written or read. The message names it, the reason, and what to do next."""


class EngineFailed(Exception):
    """The loss of an engine's process. The message names it, the reason, and what to do next."""


class PolicyDiverged(Exception):
    """Weights that give no numbers any more. The message names the step, and what to do next."""


class OtherRankFailed(Exception):
    """A failure of another rank, which reports it."""


@contextmanager
def files_of(path: Path, verb: str = "written", advice: str = "") -> Iterator[None]:
    """Turn an error of the file system in the block into FileFailed. path: the file that the block is about; verb: what
    is done with it; advice: what to do next."""
    try:
        yield
    except FileFailed:
        raise
    except (OSError, SafetensorError) as error:
        raise file_failure(error, path, verb, advice) from error


def file_failure(error: OSError | SafetensorError, path: Path, verb: str = "written", advice: str = "") -> FileFailed:
    """Make the one line of an error of the file system."""
    number, reason = _number_of(error), in_one_line(error)
    if number is not None:
        reason = os.strerror(number)
    if isinstance(error, OSError) and error.filename is not None and Path(str(error.filename)) != path:
        reason = f"{error.filename}: {reason}"
    remedy = "make room there" if number in _FULL else "mend that"
    return FileFailed(f"{path} cannot be {verb}: {reason}; {advice or f'{remedy}, then {RESUME}'}")


def of_path(error: OSError) -> str | None:
    """Return the one line of a path that cannot be used: this user may not, or its name is too long, say. None for an
    error that is of no path."""
    return None if error.filename is None else " ".join(f"{error.filename}: {error.strerror}".split())


def show_place_in_user_code(error: Exception) -> None:
    """Print the traceback of an error that a user's function has raised, or a library that it called: its place is what
    its author looks for. Errors of this package have their place in their message."""
    places, root = traceback.extract_tb(error.__traceback__), Path(__file__).parents[1]
    rooms = [root / name for name in ("integration", "rollout", "weight_sync", "kernels")]
    if places and not any(Path(places[-1].filename).is_relative_to(room) for room in rooms):
        traceback.print_exception(error)


def _number_of(error: OSError | SafetensorError) -> int | None:
    """Return the error's errno. safetensors has it in its text only."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
