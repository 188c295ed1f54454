"""Every path of weights with faults at every bucket boundary and within every bucket, of every kind.

An engine and its verbs run in one process. The sender is a fork for each injection and calls the verbs over a socket.
Afterwards the engine has exactly the old weights or exactly the new ones, reports which, generates from them or reports
the reason to refuse, and no process has waited beyond a deadline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.integration.bench.parts.chaos import Forked
from lockstep.rollout.errors import SamplingRefused
from lockstep.tests.weight_sync.transaction.engine_under_test import EngineUnderTest, run_lane
from lockstep.tests.weight_sync.transaction.faulty_senders import SENDERS, Fault, units_of
from lockstep.tests.weight_sync.transaction.two_states import CALL_S, LATE_S, NUM_LANES, SUITE_S, State, two_states
from lockstep.weight_sync.errors import Poisoned


def all_faults(states: tuple[State, State], every_kind_between: bool) -> list[Fault]:
    """List every path and kind, at the beginning of every unit and within it, and at the commit. Last of a path: no
    fault.

    every_kind_between: also for units that are neither first nor last. False: a kill, and of the other kinds a third in
    turn, at each of these.
    """
    faults = []
    for path in SENDERS:
        num_units = len(units_of(path, *states))
        kinds = ["kill", "hang", "corrupt", "drop", "wrong shape", "duplicate", "unknown name"]
        for unit in range(num_units):
            here = [Fault(path, kind, unit) for kind in kinds]
            # One request for all tensors is refused as a whole: most of its faults have no middle.
            inner = ("kill", "corrupt") if path == "tensor by tensor" else kinds
            here += [Fault(path, kind, unit, within=True) for kind in inner]
            if path != "disk":
                here.append(Fault(path, "duplicate bucket", unit))
            if not every_kind_between and 0 < unit < num_units - 1:
                here = [f for number, f in enumerate(here) if f.kind == "kill" or (number + unit) % 3 == 0]
            faults += here
        faults += [Fault(path, kind, num_units, within) for kind in ("kill", "hang") for within in (False, True)]
        faults.append(Fault(path, "none"))
    verbs = ("pause_generation", "flush_cache", "begin_weight_update", "verify_weight_update", "end_weight_update")
    faults += [Fault("disk", f"no answer to {verb}") for verb in verbs]
    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "every_kind_between",
    [pytest.param(False, id="each-once"), pytest.param(True, id="all", marks=pytest.mark.exhaustive)],
)
def test_no_fault_of_a_sender_tears_weights_or_outlives_a_deadline(
    tmp_path: Path, record_property: Callable[[str, object], None], every_kind_between: bool
) -> None:
    torch.set_num_threads(1)
    states = two_states()
    faults = all_faults(states, every_kind_between)
    lanes = [faults[lane::NUM_LANES] for lane in range(NUM_LANES)]
    started = time.monotonic()
    processes = [Forked(partial(run_lane, share, tmp_path, states, lane)) for lane, share in enumerate(lanes)]
    try:
        wrong = []
        for process, share in zip(processes, lanes, strict=True):
            if not process.wait(SUITE_S - (time.monotonic() - started)):
                wrong.append("a lane hangs")
            elif process.error is not None:
                wrong.append(process.error)
            elif not process.finished:
                wrong.append(f"an engine died:\n{process.log_tail()}")
            else:
                assert len(process.result) == len(share)  # type: ignore[arg-type]
        assert not wrong, "\n".join(wrong)
    finally:
        for process in processes:
            process.end()
    rows = [row for process in processes for row in process.result]  # type: ignore[attr-defined]
    record_property("figures", f"{table(rows)}\n{time.monotonic() - started:.0f} s")
    assert sum(kind != "none" for _, kind, _ in rows) >= 200


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of the injections by path and kind, and of the weights after them."""
    counts = Counter((path, kind.split(" to ")[0]) for path, kind, _ in rows)
    kinds = list(dict.fromkeys(kind for _, kind in counts))
    lines = [" " * 18 + "".join(f"{kind:>18}" for kind in kinds)]
    for path in dict.fromkeys(path for path, _ in counts):
        lines.append(f"{path:18}" + "".join(f"{counts[path, kind]:18}" for kind in kinds))
    outcome = Counter(outcome for _, kind, outcome in rows if kind != "none")
    lines.append(f"{outcome.total()} injections: {outcome['old']} left the old weights, {outcome['new']} the new ones")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["distributed", "shared memory", "disk"])
def test_without_undo_a_killed_sender_leaves_a_refusal_that_a_verified_update_lifts(path: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    states = two_states()
    lane = Forked(partial(_poison_and_heal, path, tmp_path, states))
    try:
        assert lane.wait(12 * (CALL_S + LATE_S)) and lane.error is None and lane.finished, lane.error
    finally:
        lane.end()


def _poison_and_heal(path: str, folder: Path, states: tuple[State, State]) -> None:
    engine = EngineUnderTest(folder, states, 0)
    service = engine.service
    service.begin_weight_update(weight_version="torn", undo="none")
    first = dict(list(states[1].weights.items())[:3])
    service.update_weights_from_named_tensors(list(first.items()))
    service.abort_weight_update("the sender is gone")
    assert service.model_digest() not in [state.digest for state in states]
    assert "poisoned" in service.engine.refusal
    with pytest.raises(SamplingRefused, match="poisoned"):
        engine.generate()
    with pytest.raises(Poisoned):
        service.update_weights_from_named_tensors(list(states[1].weights.items()))
    assert engine.inject(Fault(path, "none"), "1") == "new"
    engine.close()
