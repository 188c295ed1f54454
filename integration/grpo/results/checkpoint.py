"""Checkpoints of the main job. A resumed run continues with the same results as a run without a stop.

A checkpoint is a folder `step-000020` with the trained parameters (of adapters: only these), the optimizer's tensors,
the step, the digest of all weights, by which a resumed run finds out that its frozen base is another one, and the
number of the definition of draws, under which its seeds mean the same tokens. The samples that the first rank's engine
keeps for drafts are in it, too; they change the speed of a resumed run alone. Its tensors are whole, also when the
trainer is sharded. It is written under another name, flushed to the disk and renamed, so it is complete or absent. An
older one is removed after its successor stands, and loses its name first. No pickle: tensors are safetensors, the rest
is JSON. Every random choice of the job is a pure function of (seed, step), so no generator state is kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ....kernels.sampling.definition import DRAW_DEFINITION
from ....rollout.control.drafts import EngineDrafts
from ....weight_sync.disk.atomic_folder import atomic_folder
from ...failures import FileFailed, files_of
from ..backends.backend import TrainerState

_PREFIX = "step-"
_REMEDY = "remove this folder, then --resume continues from the checkpoint before it"
_HISTORY = "draft_history.json"
_UNNUMBERED_DRAWS = 1  # of checkpoints that were written before definitions had numbers


def save_checkpoint(
    folder: Path,
    step: int,
    state: TrainerState,
    digest: str | None = None,
    drafts: EngineDrafts | None = None,
    num_kept: int = 2,
) -> Path:
    """Write the state after `step` finished steps, and delete all but the newest checkpoints. One rank calls it.

    drafts: of its engine, if that is in this process. num_kept: number of checkpoints that stay; 0: all. Raises
    FileFailed; then nothing is left of this checkpoint, and the older ones are all there.
    """
    path = folder / f"{_PREFIX}{step:06d}"
    with files_of(path), atomic_folder(path) as partial:
        for name in ("model", "optimizer"):
            tensors = {key: tensor.detach().contiguous() for key, tensor in getattr(state, name).items()}
            save_file(tensors, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(
            json.dumps({"step": step, "weight_digest": digest, "draw_definition": DRAW_DEFINITION}) + "\n"
        )
        if drafts is not None and drafts.keeps_history:
            drafts.save_history(partial / _HISTORY)
    for old in _checkpoints(folder)[:-num_kept] if num_kept else []:
        with files_of(old, "removed"):
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.removed")))
    return path


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint with the most steps, or None."""
    return _checkpoints(folder)[-1] if _checkpoints(folder) else None


def load_checkpoint(path: Path) -> tuple[int, TrainerState]:
    """Read a checkpoint. Returns its number of finished steps, and the state for `TrainerBackend.load_state`. Raises
    FileFailed."""
    with files_of(path, "read", _REMEDY):
        state = TrainerState(load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"))
        return _saved(path)["step"], state


def load_history(path: Path, drafts: EngineDrafts) -> None:
    """Give an engine the samples of a checkpoint, if it has some and the engine keeps them. Raises FileFailed, and
    ValueError naming a file that holds something else."""
    if drafts.keeps_history and (path / _HISTORY).exists():
        with files_of(path / _HISTORY, "read"):
            drafts.load_history(path / _HISTORY)


def saved_digest(path: Path) -> str | None:
    """Read the digest of all weights at a checkpoint. None: it has none. Raises FileFailed."""
    with files_of(path, "read", _REMEDY):
        return _saved(path).get("weight_digest")


def refuse_other_draws(path: Path) -> None:
    """Raise ValueError if the run of a checkpoint drew its tokens by another definition. Raises FileFailed."""
    with files_of(path, "read", _REMEDY):
        saved = _saved(path).get("draw_definition", _UNNUMBERED_DRAWS)
    if saved != DRAW_DEFINITION:
        raise ValueError(
            f"{path} is of a run whose tokens were drawn by definition {saved}; here they are drawn by definition "
            f"{DRAW_DEFINITION}, so its seeds mean other tokens: begin a run of another name, or resume it with the "
            "version of Lockstep that began it"
        )


def _saved(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself. Raises FileFailed for damaged JSON."""
    try:
        return json.loads((path / "state.json").read_text())
    except ValueError as error:
        raise FileFailed(f"{path} cannot be read: its state.json is damaged ({error}); {_REMEDY}") from error


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []
