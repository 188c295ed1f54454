"""A folder with a model of a run, which is there whole or not at all, and may take the place of an earlier one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ....weight_sync.disk.atomic_folder import complete_folder, partial_folder
from ...failures import files_of
from .run_folder import REMOVED


def write_model_folder(folder: Path, fill: Callable[[Path], None], on_file: Callable[[], object]) -> None:
    """Write a folder. fill: writes the files into the folder that it is given; on_file: is called after each file that
    is on the disk. Raises FileFailed; then an earlier folder of this name is as it was."""
    with files_of(folder), partial_folder(folder) as partial:
        fill(partial)
        complete_folder(partial, on_file)
        if folder.exists():  # an earlier best one; or of a run that had ended and was resumed: the same model
            old = folder.rename(folder.with_name(f".{folder.name}{REMOVED}"))
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
