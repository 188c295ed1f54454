"""The log of a run: metrics.jsonl, progress.png, optional TensorBoard events, and a progress bar."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

METRICS = "metrics.jsonl"
PLOT = "progress.png"


class RunLog:
    """A log with one line for each step. Only one rank has it; its folder must exist."""

    def __init__(self, folder: Path, num_steps: int, first_step: int, *, tensorboard: bool) -> None:
        self._folder = folder
        self._lines = drop_lines_after(folder / METRICS, first_step)
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True)
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and seldom used

            self._writer = SummaryWriter(folder / "tensorboard", purge_step=first_step)

    def step(self, line: Mapping[str, object]) -> None:
        """Append one step's metrics to the file, flushed to the disk, and show them in the bar."""
        self._lines.append(dict(line))
        with open(self._folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._writer is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name, value, line["step"])
        self._bar.set_postfix_str(self._summary(), refresh=False)
        self._bar.update()

    @property
    def heldout_accuracy(self) -> float | None:
        """The newest held-out accuracy; None before the first evaluation."""
        return next((x["heldout_accuracy"] for x in reversed(self._lines) if "heldout_accuracy" in x), None)

    def _summary(self) -> str:
        last, accuracy = self._lines[-1], self.heldout_accuracy
        heldout = "-" if accuracy is None else f"{accuracy:.1%}"
        return (
            f"reward {last['reward_mean']:.3f} | held-out {heldout} | logprob_gap {last['logprob_gap']} | "
            f"{last['rollout_tokens_per_s']:.0f} tok/s | rollout {last['rollout_s']:.2f}s train {last['train_s']:.2f}s "
            f"sync {last['sync_s']:.3f}s | v{last['weight_version']} {str(last['weight_digest'])[:8]}"
        )

    def close(self) -> None:
        """Close the bar and the TensorBoard file, and draw the plot."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()
        if self._lines:
            plot(self._lines, self._folder / PLOT)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every complete line of a metrics file. A last line that a kill cut off is left out."""
    if not path.is_file():
        return []
    *lines, _rest = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def drop_lines_after(path: Path, num_steps: int) -> list[dict[str, Any]]:
    """Keep only the first `num_steps` steps of a metrics file, atomically. Returns their lines."""
    kept = [line for line in read_metrics(path) if line["step"] <= num_steps]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)
    return kept


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Plot reward, held-out accuracy, log-probability gap and seconds against the step, as a PNG."""
    import matplotlib  # an extra, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line["step"] for line in lines]
    evaluated = [line for line in lines if "heldout_accuracy" in line]
    figure, (quality, gap, seconds) = pyplot.subplots(3, 1, sharex=True, figsize=(8, 9))
    quality.plot(steps, [line["reward_mean"] for line in lines], label="reward, sampled", alpha=0.6)
    quality.plot(
        [line["step"] for line in evaluated], [line["heldout_accuracy"] for line in evaluated],
        "o-", label="held-out, greedy",
    )  # fmt: skip
    quality.set_ylim(0, 1)
    quality.legend()
    gap.plot(steps, [line["logprob_gap"] for line in lines])
    gap.set_ylabel("logprob_gap")
    for name in ("rollout_s", "train_s", "sync_s"):
        seconds.plot(steps, [line[name] for line in lines], label=name)
    seconds.set_xlabel("step")
    seconds.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
