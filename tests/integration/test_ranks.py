"""The device of a rank, by torchrun's environment and the GPUs that there are."""

from __future__ import annotations

import pytest
import torch

from lockstep.integration.ranks import Ranks, this_rank


def on_a_machine(monkeypatch: pytest.MonkeyPatch, num_gpus: int, local_rank: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, num_gpus=2, local_rank=1)
    for device in ("", "cuda"):
        ranks = this_rank(device)
        assert (ranks.rank, ranks.num_ranks, ranks.device) == (3, 4, torch.device("cuda", 1))
    assert this_rank("cpu").device == torch.device("cpu")


def test_more_ranks_than_gpus_are_refused_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, num_gpus=1, local_rank=1)
    with pytest.raises(ValueError, match="rank 1 of this machine has none, for there are 1"):
        this_rank()
    assert this_rank("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_wait_while_the_first_rank_writes_and_go_on_where_it_fails(fails):
    events: list[str] = []

    def write() -> None:
        events.append("writes")
        if fails:
            raise OSError("no space left")

    for rank in range(2):
        ranks = Ranks(rank, 2, torch.device("cpu"))
        ranks.activity.meeting = lambda rank=rank: events.append(f"rank {rank} meets")
        if fails and ranks.is_first:
            with pytest.raises(OSError, match="no space left"):
                ranks.first_alone(write)
        else:
            ranks.first_alone(write)
    assert events == ["writes", "rank 0 meets", "rank 1 meets"]


def test_a_gpu_that_is_asked_for_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine(monkeypatch, num_gpus=0, local_rank=0)
    assert this_rank().device == torch.device("cpu")
    with pytest.raises(ValueError, match="no CUDA device"):
        this_rank("cuda")
