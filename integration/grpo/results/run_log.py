"""The log of a run: metrics.jsonl, progress.png, a progress bar; optionally TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ....weight_sync.disk.atomic_folder import flush
from ...failures import FileFailed, files_of
from .statistics import REWARD, of_evaluation
from .wandb_log import WandbLog

if TYPE_CHECKING:  # an extra, and slow to import
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PLOT = "progress.png"
_NUM_SHOWN = 3  # further evaluations in the bar


class RunLog:
    """A log with one line for each step. Only one rank has it; its folder must exist.

    The metrics must not be lost: FileFailed is raised where they cannot be written. The bar, the plot, TensorBoard's
    events and Weights & Biases are views of them: one that cannot be written is reported once, and the run goes on.
    """

    def __init__(
        self, folder: Path, num_steps: int, first_step: int, *, tensorboard: bool, wandb: WandbLog | None = None
    ) -> None:
        self._wandb = wandb
        self._folder = folder
        self._num_steps = num_steps
        self._lines = drop_lines_after(folder / METRICS, first_step)
        self._are_shares = _are_shares(_rewards(self._lines))
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True, file=_Stderr())
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and seldom used

            with files_of(folder / "tensorboard"):
                # Steps count from 1, and an event of the purged step itself is hidden too.
                self._writer = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)

    def step(self, line: Mapping[str, object]) -> None:
        """Append one step's metrics to the file, flushed to the disk, and show them in the bar."""
        self._lines.append(dict(line))
        self._are_shares &= _are_shares(_rewards([line]))
        path = self._folder / METRICS
        with files_of(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self._writer is not None:
            try:
                for name, value in line.items():
                    if isinstance(value, int | float) and name != "step":
                        self._writer.add_scalar(name, value, line["step"])
            except OSError as error:
                self._drop_tensorboard(error)
        if self._wandb is not None:
            self._wandb.step(line)
        self._bar.set_postfix_str(self._summary(), refresh=False)
        self._bar.update()

    def _drop_tensorboard(self, error: OSError) -> None:
        self._writer = None
        logger.error("TensorBoard's events in %s end here, the run goes on: %s", self._folder, error)

    def show(self, texts: Iterable[str]) -> None:
        """Print texts above the bar."""
        for text in texts:
            with suppress(OSError):
                self._bar.write(text)

    def heldout(self, *others: float, name: str = "") -> str:
        """Return the newest mean reward of the held-out problems, as text; "-" without an evaluation in the metrics.
        others: rewards that it is shown beside; name: of another evaluation."""
        metric = of_evaluation(REWARD, name)
        found = next((line[metric] for line in reversed(self._lines) if metric in line), None)
        return "-" if found is None else self._text(found, *others)

    def result(self, before: Mapping[str, float]) -> str:
        """Return the run's result in one line. before: what its evaluations found before its first step."""
        more = "".join(f"; {name}: {self._change(before, name)}" for name in self._names())
        return f"held-out mean reward: {self._change(before)} {self._num_steps} steps{more}"

    def _change(self, before: Mapping[str, float], name: str = "") -> str:
        reward = before.get(of_evaluation(REWARD, name))
        if reward is None:  # a resumed run has this evaluation, which it did not begin with
            return f"{self.heldout(name=name)} after"
        return f"{self._text(reward)} before, {self.heldout(reward, name=name)} after"

    def _names(self) -> list[str]:
        """Return the names of the further evaluations in the metrics."""
        return evaluation_names(self._lines)

    def _text(self, reward: float, *others: float) -> str:
        """Return a reward as a percentage, if all rewards of the run are shares, and else as a number."""
        return f"{reward:.1%}" if self._are_shares and _are_shares([reward, *others]) else f"{reward:.3f}"

    def _heldouts(self) -> str:
        """Return the newest mean rewards of the evaluations, a few of them where there are many."""
        names = self._names()
        shown = [f"{name} {self.heldout(name=name)}" for name in names[:_NUM_SHOWN]]
        shown += [f"{len(names) - _NUM_SHOWN} more"] if len(names) > _NUM_SHOWN else []
        return self.heldout() + (f" ({', '.join(shown)})" if shown else "")

    def _summary(self) -> str:
        last = self._lines[-1]
        ahead = f"lag {last['lag_mean']:.2f} | " if last.get("lag_mean") else ""
        if last.get("kept_share") is not None:
            ahead += f"kept {last['kept_share']:.1%} of {last['verified_tokens']} verified | "
        if last.get("dropped_tokens"):
            ahead += f"dropped {last['dropped_tokens']} | "
        rewards = f"rewards {seconds:.2f}s " if (seconds := last.get("reward_s", 0.0)) >= 0.005 else ""
        unmeasured = f" without {n} samples" if (n := last.get("samples_unmeasured")) else ""
        return (
            f"reward {last['reward_mean']:.3f} | held-out {self._heldouts()} | "
            f"logprob_gap {last['logprob_gap']}{unmeasured} | {ahead}{last['rollout_tokens_per_s']:.0f} tok/s | "
            f"rollout {last['rollout_s']:.2f}s {rewards}train {last['train_s']:.2f}s "
            f"sync {last['sync_s']:.3f}s | v{last['weight_version']} {str(last['weight_digest'])[:8]}"
        )

    def close(self, *, draws: bool = True) -> None:
        """Close the bar and the other views, and draw the plot. draws=False: after a file has failed."""
        self._bar.close()
        if self._wandb is not None:
            is_whole = bool(self._lines) and self._lines[-1]["step"] == self._num_steps
            self._wandb.close(exit_code=0 if is_whole else 1)
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._drop_tensorboard(error)
        try:
            if self._lines and draws:
                plot(self._lines, self._folder / PLOT)
        except OSError as error:
            logger.error("%s is not up to date: %s", self._folder / PLOT, error)


class _Stderr:
    """Standard error for a bar, which may be a file on a full disk: what cannot be written is dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def read_metrics(path: Path, num_steps: int | None = None) -> list[dict[str, Any]]:
    """Read every complete line of a metrics file. A last line that a kill cut off is left out.

    num_steps: what is damaged behind the line of this step is left out, too. Raises FileFailed for other such lines.
    """
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    *lines, _rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            if num_steps is not None and any(before["step"] >= num_steps for before in found):
                break
            raise FileFailed(
                f"{path} cannot be read: line {number} is damaged; remove that line, then --resume goes on"
            )
        found.append(value)
    return found


def drop_lines_after(path: Path, num_steps: int) -> list[dict[str, Any]]:
    """Keep only the first `num_steps` steps of a metrics file, atomically. Returns their lines. Raises FileFailed."""
    partial = path.with_suffix(".partial")
    with files_of(path):
        kept = [line for line in read_metrics(path, num_steps) if line["step"] <= num_steps]
        if (num_lost := num_steps - len(kept)) > 0:
            logger.warning("%s lacks %d of the %d steps that are done", path, num_lost, num_steps)
        try:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            flush(partial)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    return kept


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Plot reward, mean held-out reward, log-probability gap and seconds against the step, as a PNG; where rollouts ran
    ahead of training also the lag, and the share of tokens that commits kept."""
    import matplotlib  # an extra, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line["step"] for line in lines]
    ran_ahead = any(line.get("lag_mean") or line.get("kept_share") is not None for line in lines)
    figure, axes = pyplot.subplots(3 + ran_ahead, 1, sharex=True, figsize=(8, 9 + 3 * ran_ahead))
    quality, gap, seconds = axes[:3]
    plot_rewards(lines, quality)
    gap.plot(steps, [line["logprob_gap"] for line in lines])
    gap.set_ylabel("logprob_gap")
    for name in (
        "rollout_s",
        "reward_s",
        "train_s",
        "sync_s",
        *(("generate_s", "verify_s", "wait_s") if ran_ahead else ()),
    ):
        seconds.plot(steps, [line.get(name, float("nan")) for line in lines], label=name)
    seconds.legend()
    if ran_ahead:
        for name, label in (("lag_mean", "lag of a token, in commits"), ("kept_share", "share of tokens kept")):
            values = [line.get(name) for line in lines]
            axes[3].plot(steps, [float("nan") if value is None else value for value in values], label=label)
        axes[3].legend()
    axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_rewards(lines: list[dict[str, Any]], axes: Axes) -> None:
    """Plot the mean rewards of the samples and of the held-out problems; from 0 to 1, if all are shares."""
    evaluated = [line for line in lines if REWARD in line]
    axes.plot([line["step"] for line in lines], [line["reward_mean"] for line in lines],
              label="reward, sampled", alpha=0.6)  # fmt: skip
    axes.plot([line["step"] for line in evaluated], [line[REWARD] for line in evaluated], "o-", label="held-out")
    for name in (names := evaluation_names(lines)):
        metric = of_evaluation(REWARD, name)
        its = [(line["step"], line[metric]) for line in lines if metric in line]
        axes.plot(*zip(*its, strict=True), ".--", label=name, linewidth=1)
    if _are_shares(_rewards(lines)):
        axes.set_ylim(0, 1)
    axes.legend(ncols=1 + len(names) // 4, fontsize="small" if names else None)


def evaluation_names(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the further evaluations in the metrics, in the order in which they come."""
    prefix = f"{REWARD}/"
    names = (key.removeprefix(prefix) for line in lines for key in line if key.startswith(prefix))
    return list(dict.fromkeys(names))


def _rewards(lines: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the mean rewards in the metrics."""
    return [line[key] for line in lines for key in line if key == "reward_mean" or key.partition("/")[0] == REWARD]


def _are_shares(rewards: Iterable[float]) -> bool:
    return all(0 <= one <= 1 for one in rewards)
