"""Checkpoints of the main job. A resumed run continues with the same results as a run without a stop.

A checkpoint is a folder `step-000020` with the trained parameters (of adapters: only these), the optimizer's tensors,
the step, the SHA-256 of its files, the settings of the run, the digest of all weights, by which a resumed run finds out
that its frozen base is another one, and the number of the definition of draws, under which its seeds mean the same
tokens. The samples that the first rank's engine keeps for drafts are in it, too; they change the speed of a resumed run
alone. Its tensors are whole, also when the trainer is sharded; they are gathered, written and read one by one. It is
written under another name, flushed to the disk and renamed, so it is complete or absent. An older one is removed after
its successor stands, and loses its name first. No pickle: tensors are safetensors, the rest is JSON. Every random
choice of the job is a pure function of (seed, step), so no generator state is kept.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....kernels.sampling.definition import DRAW_DEFINITION
from ....rollout.control.drafts import EngineDrafts
from ....weight_sync.disk.atomic_folder import atomic_folder
from ...failures import FileFailed, files_of
from ...ranks import Ranks
from ..backends.backend import GatheredState, TrainerState
from .json_files import read_json, write_json
from .tensor_file import OnBytes, TensorFile, save_tensors, sha256_of

_PREFIX = "step-"
_STATE = "state.json"
_REMEDY = "remove this folder, then --resume continues from the checkpoint before it"
_HISTORY = "draft_history.json"
_REMEDY_OF_HISTORY = (
    "remove it, then --resume goes on with the same results, without drafts of earlier samples at first"
)
_UNNUMBERED_DRAWS = 1  # of checkpoints that were written before definitions had numbers


def _unheard(_num_bytes: int) -> None:
    """Do nothing for bytes that are done."""


def save_checkpoint(
    folder: Path,
    step: int,
    state: GatheredState,
    digest: str | None = None,
    drafts: EngineDrafts | None = None,
    num_kept: int = 2,
    settings: Mapping[str, object] | None = None,
    on_bytes: OnBytes = _unheard,
) -> Path:
    """Write the state after `step` finished steps, and delete all but the newest checkpoints. One rank calls it, while
    the others iterate over the same state; each tensor is on the disk before the next one is gathered.

    drafts: of its engine, if that is in this process. num_kept: number of checkpoints that stay; 0: all. settings: of
    the run, by their keys. on_bytes: is called after each piece that is written. Raises FileFailed; then nothing is
    left of this checkpoint, and the older ones are there.
    """
    path = folder / f"{_PREFIX}{step:06d}"
    with files_of(path), atomic_folder(path) as partial:
        for name, tensors in (("model", state.model), ("optimizer", state.optimizer)):
            save_tensors(tensors, tensors.names, partial / f"{name}.safetensors", on_bytes)
        if drafts is not None and drafts.keeps_history:
            drafts.save_history(partial / _HISTORY)
        files = {file.name: sha256_of(file, on_bytes) for file in partial.iterdir()}
        described = {"step": step, "weight_digest": digest, "draw_definition": DRAW_DEFINITION, "sha256": files}
        write_json(partial / _STATE, described | {"settings": settings})
    for old in _checkpoints(folder)[:-num_kept] if num_kept else []:
        with files_of(old, "removed"):
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.removed")))
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint with the most steps, or None."""
    return _checkpoints(folder)[-1] if _checkpoints(folder) else None


def refuse_other_checkpoints(ranks: Ranks, checkpoint: Path | None) -> None:
    """Raise ValueError, on all ranks, unless all of them found the same checkpoint. All ranks call it together."""
    found = ranks.of_all(_identity(checkpoint))
    others = [rank for rank, one in enumerate(found) if one[1:] != found[0][1:]]
    if not others:
        return
    shown = ", ".join(f"rank {rank} {_shown(found[rank])}" for rank in (0, *others[:3]))
    raise ValueError(
        f"the ranks do not see the same checkpoint: {shown}. The folder of run.dir must be shared by all machines of a "
        "job: name one that is, or copy the newest checkpoint to each of them"
    )


def _identity(checkpoint: Path | None) -> tuple[str, int | None, str]:
    """Return the place, the steps and a digest of a checkpoint. One that cannot be read is refused by its loading."""
    if checkpoint is None:
        return "", None, ""
    try:
        digest = hashlib.sha256((checkpoint / _STATE).read_bytes()).hexdigest()
    except OSError:
        digest = "cannot be read"
    return str(checkpoint), _step_of(checkpoint), digest


def _shown(found: tuple[str, int | None, str]) -> str:
    path, step, digest = found
    return "has none" if step is None else f"has {path} (SHA-256 of its {_STATE}: {digest[:16]})"


def num_steps_done(folder: Path) -> int:
    """Return the number of steps of the newest checkpoint, 0 where the folder has none. Reads names alone."""
    return max((step for path in _checkpoints(folder) if (step := _step_of(path)) is not None), default=0)


def load_checkpoint(path: Path, on_bytes: OnBytes = _unheard) -> tuple[int, TrainerState]:
    """Read a checkpoint. Returns its number of finished steps, and the state for `TrainerBackend.load_state`. on_bytes:
    is called meanwhile, after each piece that was checked. Raises FileFailed."""
    saved = _saved(path)
    tensors = []
    for name in ("model.safetensors", "optimizer.safetensors"):
        with files_of(path, "read", _REMEDY):
            _refuse_other_file(path / name, saved, _REMEDY, on_bytes)
            tensors.append(TensorFile(path / name))
    return saved["step"], TrainerState(*tensors)


def load_history(path: Path, drafts: EngineDrafts) -> None:
    """Give an engine the samples of a checkpoint, if it has some and the engine keeps them. Raises FileFailed, and
    ValueError naming a file that holds something else."""
    history = path / _HISTORY
    if drafts.keeps_history and history.exists():
        with files_of(history, "read", _REMEDY_OF_HISTORY):
            _refuse_other_file(history, _saved(path), _REMEDY_OF_HISTORY)
            drafts.load_history(history)


def saved_digest(path: Path) -> str | None:
    """Read the digest of all weights at a checkpoint. None: it has none. Raises FileFailed."""
    return _saved(path).get("weight_digest")


def saved_settings(path: Path) -> Mapping[str, object] | None:
    """Read the settings of the run that wrote a checkpoint. None: it does not tell. Raises FileFailed."""
    settings = _saved(path).get("settings")
    return settings if isinstance(settings, dict) else None


def refuse_other_draws(path: Path) -> None:
    """Raise ValueError if the run of a checkpoint drew its tokens by another definition. Raises FileFailed."""
    saved = _saved(path).get("draw_definition", _UNNUMBERED_DRAWS)
    if saved != DRAW_DEFINITION:
        raise ValueError(
            f"{path} is of a run whose tokens were drawn by definition {saved}; here they are drawn by definition "
            f"{DRAW_DEFINITION}, so its seeds mean other tokens: begin a run of another name, or resume it with the "
            "version of Lockstep that began it"
        )


def _saved(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself. Raises FileFailed where it is damaged, or that of another checkpoint."""
    saved = read_json(path / _STATE, {"step": int}, _REMEDY)
    if saved["step"] != _step_of(path):
        raise FileFailed(f"{path / _STATE} cannot be read: it is of step {saved['step']}; {_REMEDY}")
    return saved


def _refuse_other_file(file: Path, saved: Mapping[str, Any], remedy: str, on_bytes: OnBytes = _unheard) -> None:
    """Raise FileFailed for a file that is not the one which was saved; older checkpoints do not tell."""
    hashes = saved.get("sha256")
    expected = hashes.get(file.name) if isinstance(hashes, dict) else None
    if expected is not None and (found := sha256_of(file, on_bytes)) != expected:
        raise FileFailed(
            f"{file} cannot be read: it is not the file that was saved, its SHA-256 was {expected} and is {found}; "
            f"{remedy}"
        )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder in the order of their steps. Other names, of copies say, are none."""
    found = {path: _step_of(path) for path in (folder.iterdir() if folder.is_dir() else ())}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: found[path] or 0)


def _step_of(path: Path) -> int | None:
    """Return the steps of the checkpoint with this name; None for another name."""
    number = path.name.removeprefix(_PREFIX)
    return int(number) if path.name != number and number.isascii() and number.isdigit() else None
