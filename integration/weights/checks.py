"""The weights checker, which compares the engine's tensors with digests and with an earlier snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ...rollout.engine import Engine
from ...weight_sync.digests.checker import checksum, compare, reset_tensors, snapshot
from ...weight_sync.digests.sglang import per_engine_checksum, rank_record
from ...weight_sync.manifest import NamedTensors
from .all_ranks import Replica
from .sessions import WeightSessions

_NUM_NAMED = 8  # most tensors named in one message
ACTIONS = ("checksum", "snapshot", "compare", "reset_tensors")


class WeightChecks:
    """Run the checker's actions between two steps of an engine."""

    def __init__(self, engine: Engine, sessions: WeightSessions, replica: Replica) -> None:
        self._engine = engine
        self._sessions = sessions
        self._replica = replica
        self._snapshot: dict[str, Tensor] | None = None

    def run(self, action: str, skip: Sequence[str], seed: int | None) -> dict[str, object]:
        """Run an action and return its report, with `success` and `message`. Raises ValueError for an unknown action.

        - checksum: SHA-256 per tensor, the rank's digest over them, the model digest, the digests in SGLang's form, and
          the names of tensors that differ from the published ones (`differing`, of each rank by itself).
        - snapshot: keep a copy on the host.
        - compare: compare with the snapshot, naming tensors that are missing, unexpected or changed.
        - reset_tensors: overwrite with random values; sampling is then refused until a full update.

        Of several ranks each checks the tensors that it holds; `rank_results` has each rank's report.
        """
        if action not in ACTIONS:
            raise ValueError(f"Unsupported action={action!r}")

        def run() -> dict[str, object]:
            return self._engine.between_steps(f"weights_checker {action}", lambda: self._run(action, skip, seed))

        if action == "reset_tensors":  # first the sessions' lock, then the engine's
            self._sessions.finish_digest()
            report = self._sessions.without_session(f"weights_checker {action}", run)
        else:
            report = run()
        return report if self._replica.is_alone else self._of_all_ranks(report)

    def _run(self, action: str, skip: Sequence[str], seed: int | None) -> dict[str, object]:
        if action == "checksum":
            return self._checksum(skip)
        if action == "snapshot":
            self._snapshot = snapshot(self._tensors(), skip=skip)
            return {"success": True, "message": f"{len(self._snapshot)} tensors were copied"}
        if action == "compare":
            return self._compare(skip)
        self._replica.require_idle(action, "cannot overwrite the weights: ")
        names = reset_tensors(self._tensors(), skip=skip, seed=seed)
        self._sessions.weights_were_lost(set(names))
        return {"success": True, "message": f"{len(names)} tensors hold random values now"}

    def _of_all_ranks(self, own: dict[str, Any]) -> dict[str, Any]:
        """Add all ranks' reports to this rank's report. It is a success only where every rank succeeded."""
        mesh = self._engine.ranks.mesh
        place = {"rank": mesh.rank, "tp_rank": mesh.tp_rank, "pp_rank": mesh.pp_rank}
        said = self._replica.gather({**place, **own})
        failed = [f"rank {r['rank']}: {r['message']}" for r in said if not r["success"]]
        own = {**own, "success": not failed, "rank_results": said}
        if failed:
            own["message"] = "\n".join(failed)
        if "ranks" in own:
            own["ranks"] = [record for r in said for record in r["ranks"]]
            own["per_engine_checksum"] = per_engine_checksum([record["per_gpu_checksum"] for record in own["ranks"]])
        return own

    def _checksum(self, skip: Sequence[str]) -> dict[str, object]:
        report = checksum(self._tensors(), skip=skip)
        record = rank_record(self._tensors(), skip=skip)
        digest, differing = self._sessions.look()
        message = "Success" if digest is not None else "ranks that hold the same bytes of some tensors do not agree"
        if differing:
            message += f"; {len(differing)} are not as they were published: {', '.join(differing[:_NUM_NAMED])}"
        return {
            "success": digest is not None,
            "message": message,
            "ranks": [record],
            "per_engine_checksum": per_engine_checksum([str(record["per_gpu_checksum"])]),
            "tensors": report.tensors,
            "rank_digest": report.rank_digest,
            "num_bytes": report.num_bytes,
            "seconds": report.seconds,
            "model_digest": digest,
            "differing": differing,
        }

    def _compare(self, skip: Sequence[str]) -> dict[str, object]:
        if self._snapshot is None:
            return {"success": False, "message": "there is no snapshot to compare with"}
        report = compare(self._tensors(), self._snapshot, skip=skip)
        if report.is_equal:
            self._snapshot = None
        lines = [f"{name}: in the snapshot only" for name in report.missing]
        lines += [f"{name}: not in the snapshot" for name in report.unexpected]
        lines += [
            f"{d.name}: max_abs_err={d.max_abs_err} mean_abs_err={d.mean_abs_err} num_exceed={d.num_differing} "
            f"expect={d.expected} actual={d.actual}"
            for d in report.changed
        ]
        message = "\n".join(["check tensor equality failed:", *lines]) if lines else "Success"
        return {"success": report.is_equal, "message": message, **asdict(report)}

    def _tensors(self) -> NamedTensors:
        model = self._engine.model
        return [*model.resident_tensors(), *model.buffers()]
