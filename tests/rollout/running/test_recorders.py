"""Recorders around others: what a hook on a module must see is no replay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from lockstep.rollout.running.recorders import CUDAGraphs, PlainWhileHooked, Run, first_host_read

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _Counting:
    """A recorder that keeps the results of one run, as a capture does."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, run: Run) -> Run:
        self.num_recorded += 1
        results = run()

        def replay() -> Sequence[Tensor]:
            self.num_replayed += 1
            return results

        return replay


def test_steps_are_plain_calls_while_there_are_hooks_and_replays_otherwise() -> None:
    module, x, seen = nn.Sequential(nn.Linear(3, 3)), torch.ones(1, 3), []
    counting = _Counting()

    def run() -> Sequence[Tensor]:
        return [module(x)]

    hook = module[0].register_forward_hook(lambda *_: seen.append(1))
    step = PlainWhileHooked(counting, module).record(run)
    step()
    assert (len(seen), counting.num_recorded) == (1, 0), "nothing is captured with a hook"
    hook.remove()
    step()
    step()
    assert (len(seen), counting.num_recorded, counting.num_replayed) == (1, 1, 2)
    hook = module.register_forward_pre_hook(lambda *_: seen.append(1))
    step()
    assert (len(seen), counting.num_replayed) == (2, 2)
    hook.remove()
    step()
    assert (len(seen), counting.num_recorded, counting.num_replayed) == (2, 1, 3)


def test_without_hooks_a_step_is_recorded_at_once() -> None:
    counting = _Counting()
    PlainWhileHooked(counting, nn.Linear(1, 1)).record(lambda: [torch.ones(1)])
    assert counting.num_recorded == 1


@torch.inference_mode()
def test_reads_of_data_on_the_host_are_found_before_a_capture_which_would_fail_of_them() -> None:
    x = torch.ones(3)
    assert first_host_read(lambda: [x + 1]) is None
    assert first_host_read(lambda: [x + 1 if (x > 2).any() else x]) == "aten.is_nonzero.default"
    assert first_host_read(lambda: [torch.tensor([1.0, x[0]])]) == "tensor"
    assert first_host_read(lambda: [x * x.tolist()[0]]) == "tolist"


@pytest.mark.gpu
@GPU
@torch.inference_mode()
def test_a_captured_step_calls_no_hook_and_a_plain_one_does() -> None:
    module, seen = nn.Linear(3, 3, device="cuda"), []
    x = torch.ones(1, 3, device="cuda")
    step = PlainWhileHooked(CUDAGraphs(x.device), module).record(lambda: [module(x)])
    expected = module(x)
    assert torch.equal(step()[0], expected)
    module.register_forward_hook(lambda *_: seen.append(1))
    for num in (1, 2):
        assert torch.equal(step()[0], expected) and len(seen) == num
