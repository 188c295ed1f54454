"""Weight-update groups over several workers: the ranks of each worker, and a check that all members are present."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...http.edge.errors import HttpError
from .worker import Worker

DEFAULT_GROUP = "weight_update_group"
VLLM_GROUP = "vllm_weight_transfer"  # the only one of vLLM's calls, which name none
_VLLM_VERBS = ("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "update_weights")


def group_of(verb: str, values: Mapping[str, object]) -> str:
    """Return the name of the group that a call is about."""
    return VLLM_GROUP if verb in _VLLM_VERBS else str(values.get("group_name") or DEFAULT_GROUP)


def rank_offsets(num_ranks: Sequence[int], rank_offset: int, world_size: int) -> list[int]:
    """Compute the first rank of each worker. Workers have consecutive ranks from `rank_offset` on.

    Raises ValueError where the group has too few ranks for all workers.
    """
    end = rank_offset + sum(num_ranks)
    if rank_offset < 1:
        raise ValueError(f"rank_offset must be at least 1, since rank 0 sends; it is {rank_offset}")
    if end > world_size:
        ranks = " + ".join(map(str, num_ranks))
        raise ValueError(
            f"world_size {world_size} is too small: {len(num_ranks)} workers with {ranks} ranks from rank_offset "
            f"{rank_offset} on need {end}"
        )
    return [rank_offset + sum(num_ranks[:i]) for i in range(len(num_ranks))]


class Groups:
    """The groups that were made through this router. Other groups are not checked."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {}  # group: {worker id: (url, its life)}

    def plan(self, name: str, values: Mapping[str, object], workers: Sequence[Worker]) -> dict[str, int]:
        """Compute the rank offset of each worker, by id. Raises HttpError: 409 for a group that exists, 422 for one
        that is too small."""
        if name in self._members:
            raise HttpError(409, f"the group {name!r} exists: destroy it first", code="group_exists")
        sizes = [worker.num_ranks for worker in workers]
        try:
            offsets = rank_offsets(sizes, _whole(values, "rank_offset"), _whole(values, "world_size"))
        except ValueError as error:
            raise HttpError(422, str(error), code="no_room") from None
        return dict(zip((worker.id for worker in workers), offsets, strict=True))

    def of_vllm(self, name: str, values: Mapping[str, object], workers: Sequence[Worker]) -> dict[str, bytes] | None:
        """Make each worker's body of vLLM's init, by id: with its own rank offset. None where it names no group. Raises
        as `plan`."""
        info = values.get("init_info")
        if not isinstance(info, dict) or "world_size" not in info:
            return None
        offsets = self.plan(name, info, workers)
        return {
            worker_id: json.dumps({**values, "init_info": {**info, "rank_offset": offset}}).encode()
            for worker_id, offset in offsets.items()
        }

    def record(self, name: str, workers: Sequence[Worker]) -> None:
        """Note the members of a group that all workers have joined."""
        self._members[name] = {worker.id: (worker.url, worker.life) for worker in workers}

    def forget(self, name: str) -> None:
        """Drop a group that was destroyed."""
        self._members.pop(name, None)

    def check(self, name: str, workers: Sequence[Worker]) -> None:
        """Raise HttpError 409, before any worker waits for a tensor, unless the live workers are the group's."""
        members = self._members.get(name)
        if members is None:
            return
        live = {worker.id: worker.life for worker in workers}
        lost = [url for worker_id, (url, life) in members.items() if live.get(worker_id) != life]
        new = [worker.url for worker in workers if worker.id not in members]
        if lost or new:
            what = [f"{', '.join(lost)} left it"] if lost else []
            what += [f"{', '.join(new)} never joined it"] if new else []
            raise HttpError(
                409, f"the group {name!r} is not whole: {'; '.join(what)}. Destroy it and init it again",
                code="group_broken",
            )  # fmt: skip


def _whole(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None
