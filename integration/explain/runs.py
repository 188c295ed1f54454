"""Run a sequence in one way: here, or on the ranks of a replica that are started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...rollout.model.loading import load_whole, read_config
from ...rollout.model.supported import DTYPES
from .checkpoint_folder import model_folder
from .engine_runs import run_engine
from .module_runs import run_trainer, run_transformers
from .recording import Recording, of_ranks
from .sequence import TokenSequence
from .ways import RunFailed, Way

PACKAGE = __package__.split(".")[0]
TIMEOUT_S = 600.0  # of the ranks of one way
_LAST_WORDS = 2000  # characters of a failed rank's output that are shown


def run_way(way: Way, sequence: TokenSequence, model: PreTrainedModel | Path) -> Recording:
    """Run the sequence in one way and return its recording. model: a module, or a folder; `way.model` replaces it.

    Raises ValueError for a way that the model does not support, RunFailed if its ranks fail.
    """
    with _model_of(way, model) as found:
        if isinstance(found, Path) and not (found / "config.json").is_file():
            raise ValueError(f"model folder {str(found)!r} holds no config.json")
        if way.num_ranks > 1:
            if not isinstance(found, Path):
                raise ValueError(f"{way.describe()} starts ranks, which need a model folder")
            return _run_on_ranks(way, sequence, found)
        if way.is_engine:
            return run_engine(found, way, sequence)
        module = load_module(found, way.dtype) if isinstance(found, Path) else found
        run = run_trainer if way.runner == "trainer" else run_transformers
        return run(module, way, sequence)


def plain_logprobs(way: Way, sequence: TokenSequence, model: PreTrainedModel | Path) -> dict[int, float]:
    """Return the log-probabilities that an engine of one rank computes while no operation is recorded; {} for other
    ways."""
    if not way.is_engine or way.num_ranks > 1:
        return {}
    with _model_of(way, model) as found:
        return run_engine(found, way, sequence, records=False).logprobs


@contextmanager
def _model_of(way: Way, model: PreTrainedModel | Path) -> Iterator[PreTrainedModel | Path]:
    """Yield the model of a way: a module, or a folder that has a checkpoint's configuration too."""
    given = Path(way.model) if way.model else model
    if not isinstance(given, Path):
        yield given
        return
    with model_folder(given) as folder:
        yield folder


def load_module(folder: Path, dtype: str) -> PreTrainedModel:
    """Load a folder as a trainer does. dtype: "" for the folder's."""
    config = read_config(folder)
    kept = DTYPES[dtype] if dtype else getattr(config, "dtype", None) or torch.float32
    return load_whole(folder, config, kept, "cuda" if torch.cuda.is_available() else "cpu")


def _run_on_ranks(way: Way, sequence: TokenSequence, model: Path) -> Recording:
    """Start a process for each rank, and put their recordings together."""
    with tempfile.TemporaryDirectory(prefix="lockstep-explain-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"way": asdict(way), "model": str(model.resolve())}))
        sequence.save(folder / "sequence.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(way.num_ranks), "-m", f"{PACKAGE}.integration.explain.rank", str(folder)]
        environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // way.num_ranks)), **os.environ}
        done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        try:
            said, _ = done.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            done.terminate()  # torchrun ends its ranks
            done.wait()
            raise RunFailed(f"the ranks of {way.describe()} were not done after {TIMEOUT_S:g} s") from error
        except BaseException:
            done.terminate()  # torchrun ends its ranks
            done.wait()
            raise
        if done.returncode:
            raise RunFailed(f"the ranks of {way.describe()} ended with {done.returncode}: {said[-_LAST_WORDS:]}")
        paths = [folder / f"rank{rank}.safetensors" for rank in range(way.num_ranks)]
        return of_ranks([Recording.load(path) for path in paths], way.tp)
