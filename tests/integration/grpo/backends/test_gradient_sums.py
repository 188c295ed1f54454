"""Gradients of parameters in bfloat16 are summed over micro-batches, and over ranks, in float32.

Run as a script, this file is one rank of the job below: `python test_gradient_sums.py FOLDER`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lockstep.integration.grpo.backends.backend import TrainerBackend
from lockstep.integration.grpo.backends.ddp import DdpBackend
from lockstep.integration.grpo.backends.fsdp2 import Fsdp2Backend
from lockstep.integration.grpo.backends.gradient_sums import GradientSums
from lockstep.integration.grpo.settings.training import TrainSettings
from lockstep.integration.ranks import Ranks, process_group, this_rank
from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.random_models import random_model

ALONE = Ranks(0, 1, torch.device("cpu"))
NUM_RANKS = 2
NUM_MICROBATCHES = 24
KINDS = {"ddp": DdpBackend, "fsdp2": Fsdp2Backend}


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(256, (1, 12), generator=generator) for _ in range(NUM_MICROBATCHES)]


def loss_of(logits: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1)[..., 7].mean()


def gradients_apart(model: PreTrainedModel, inputs: Iterable[Tensor]) -> list[dict[str, Tensor]]:
    """Compute the gradients of each micro-batch with a copy of the model."""
    model, found = copy.deepcopy(model), []
    for ids in inputs:
        loss_of(model(input_ids=ids, use_cache=False).logits).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    return found


def added(gradients: list[dict[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    totals = {name: torch.zeros_like(first, dtype=dtype) for name, first in gradients[0].items()}
    for one in gradients:
        for name, gradient in one.items():
            totals[name] += gradient
    return totals


def summed(backend: TrainerBackend, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Run the micro-batches of a step. Returns the gradients that its optimizer takes, whole."""
    for index, ids in enumerate(inputs):
        with backend.microbatch(is_last=index + 1 == len(inputs)):
            backend.backward(loss_of(backend.forward(input_ids=ids, use_cache=False)))
    taken = zip(backend._trained(), backend.optimizer.take_gradients(), strict=True)
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in taken}


def bf16_model() -> PreTrainedModel:
    return random_model("qwen3", torch.bfloat16)


# -- one process ------------------------------------------------------------------------------------------------------


def test_a_sum_keeps_what_bfloat16_would_round_away():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    sums = GradientSums([parameter])
    for gradient in [[512.0, 1.0], *[[1.0, 2.0**-9]] * 3]:
        (parameter * torch.tensor(gradient, dtype=torch.bfloat16)).sum().backward()
        assert parameter.grad is None
    found = sums.take(parameter)
    assert found is not None and found.dtype == torch.float32
    assert found.tolist() == [515.0, 1.0 + 3 * 2.0**-9]  # in bfloat16: 512 and 1
    assert sums.take(parameter) is None


def test_gradients_in_float32_are_left_to_autograd():
    parameter = nn.Parameter(torch.zeros(2))
    sums = GradientSums([parameter])
    parameter.sum().backward()
    gradient = parameter.grad
    assert gradient is not None and sums.take(parameter) is gradient and parameter.grad is None


@pytest.mark.parametrize("precision", ["masters", "stochastic"])
def test_the_gradient_of_a_step_is_the_float32_sum_of_its_microbatches_to_the_bit(precision):
    model, inputs = bf16_model(), batches(0)
    apart = gradients_apart(model, inputs)
    expected, rounded = added(apart, torch.float32), added(apart, torch.bfloat16)
    with process_group(ALONE, 30):
        backend = DdpBackend(TrainSettings(low_precision=precision), ALONE)
        backend.wrap(model)
        found = summed(backend, inputs)
        del backend
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(torch.equal(rounded[name].float(), expected[name]) for name in expected if "proj" in name)


# -- two ranks --------------------------------------------------------------------------------------------------------


def on_rank(ranks: Ranks) -> dict[str, object]:
    """Compare each kind's sums with those made by hand. Returns, of each kind, the largest error by parameter."""
    apart = gradients_apart(bf16_model(), batches(ranks.rank))
    own, told = added(apart, torch.float32), {}
    means = [{name: mean_of_ranks(g.float()) for name, g in one.items()} for one in apart]
    expected = {
        "ddp masters": {name: mean_of_ranks(total) for name, total in own.items()},
        "fsdp2 masters": added(means, torch.float32),
        "fsdp2 stochastic": added([{n: g.bfloat16() for n, g in one.items()} for one in means], torch.float32),
    }
    expected["ddp stochastic"] = expected["ddp masters"]
    for kind, wanted in expected.items():
        trainer, precision = kind.split()
        backend = KINDS[trainer](TrainSettings(low_precision=precision), ranks)
        backend.wrap(bf16_model())
        found = summed(backend, batches(ranks.rank))
        assert found.keys() == wanted.keys()
        told[kind] = {name: (found[name] - wanted[name]).abs().max().item() for name in wanted}
        told[f"{kind} dtypes"] = sorted({str(one.dtype) for one in found.values()})
    in_bf16 = added(apart, torch.bfloat16)
    told["in bfloat16"] = {name: (in_bf16[name].float() - own[name]).abs().max().item() for name in own}
    return told


def mean_of_ranks(tensor: Tensor) -> Tensor:
    tensor = tensor / NUM_RANKS
    dist.all_reduce(tensor)
    return tensor


def rank_main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = this_rank("cpu")
    with process_group(ranks, 60):
        told = on_rank(ranks)
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(told))


@pytest.mark.slow
def test_two_ranks_sum_and_average_in_float32_to_the_bit(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(NUM_RANKS):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (tmp_path / f"log{rank}").open("wb") as log:
                command = [sys.executable, __file__, str(tmp_path)]
                processes.append(prepared_python.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"log{rank}").read_text()[-4000:] for rank in range(NUM_RANKS)]
    assert codes == [0] * NUM_RANKS, "\n".join(logs)
    for rank in range(NUM_RANKS):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for kind in ("ddp masters", "ddp stochastic", "fsdp2 masters", "fsdp2 stochastic"):
            assert not any(told[kind].values()), (kind, told[kind])
            assert told[f"{kind} dtypes"] == ["torch.float32"], kind
        assert all(told["in bfloat16"].values()), "the micro-batches are too few to show anything"


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
