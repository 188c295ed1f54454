"""The Chrome trace: it is readable, and it shows that overlap is real."""

from __future__ import annotations

import json

import pytest

from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.reports.trace import Trace
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.full_disks import no_file_above

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.0)


def read(path) -> list[dict]:
    """Return the events, as a viewer reads them."""
    return [event for event in json.loads(path.read_text()) if event]


@pytest.fixture
def traced(make_model, tmp_path):
    def run(overlap: bool) -> list[dict]:
        path = tmp_path / f"{overlap}.json"
        # Without drafts: with them the measured times of steps decide how many steps a schedule holds.
        settings = EngineConfig(
            kv_cache="64 blocks", max_num_seqs=8, overlap=overlap, trace=str(path), speculation="off"
        )
        engine = Engine(make_model("qwen3"), settings)
        engine.generate([[1, 2, 3], [4] * 20], PARAMS)
        engine.add([5, 6], PARAMS, rid="retracted")
        engine.step()
        engine.pause_generation("retract")
        engine.continue_generation()
        while engine.has_work:
            engine.step()
        engine.close()
        return read(path)

    return run


def spans(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def is_inside(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_trace_tells_steps_requests_commands_and_kv(traced):
    events = traced(overlap=False)
    forwards = spans(events, "forward")
    steps = [event["args"]["step"] for event in forwards]  # of one schedule several may run
    assert [1, *steps] == sorted([1, *steps]) and set(steps) == set(range(1, steps[-1] + 1))
    assert len(steps) > len(set(steps))
    assert len(spans(events, "schedule")) >= steps[-1] == len(spans(events, "deliver"))
    assert [len(spans(events, name)) for name in ("pause_generation", "continue_generation")] == [1, 1]
    names = [event["name"] for event in events if event["ph"] == "i"]
    assert names.count("request") == names.count("answer") == 3
    assert [e["args"]["id"] for e in events if e["name"] == "retract"] == ["retracted"]
    assert all(sum(e["args"].values()) == 64 for e in events if e["ph"] == "C" and e["name"] == "blocks")
    assert not [1 for s in spans(events, "schedule") for f in forwards if is_inside(s, f)]


def test_overlap_schedules_the_next_step_and_delivers_the_last_one_inside_a_forward(traced):
    events = traced(overlap=True)
    forwards = spans(events, "forward")
    model_thread = {event["tid"] for event in forwards}
    assert len(model_thread) == 1 and not model_thread & {event["tid"] for event in spans(events, "schedule")}
    # A small model's forward may end before the other thread has run; a few will not.
    delivered = {(d["args"]["step"], f["args"]["step"]) for d in spans(events, "deliver") for f in forwards
                 if is_inside(d, f)}  # fmt: skip
    assert any((step - 1, step) in delivered for step in range(2, len(forwards) + 1))
    assert any(is_inside(s, f) for s in spans(events, "schedule") for f in forwards)


def test_trace_that_was_cut_off_can_be_mended_by_its_reader(tmp_path):
    trace = Trace(tmp_path / "t.json")
    with trace.span("work", size=3):
        pass
    trace.flush()  # and then the process is killed
    events = json.loads((tmp_path / "t.json").read_text().rstrip().rstrip(",") + "]")
    assert events[0]["name"] == "work" and events[0]["args"] == {"size": 3}
    trace.close()
    assert read(tmp_path / "t.json")[0]["name"] == "work"


def test_no_trace_writes_nothing(tmp_path):
    trace = Trace(None)
    with trace.span("work"):
        trace.instant("x")
    trace.counter("c", a=1)
    trace.close()
    assert not trace.is_on and list(tmp_path.iterdir()) == []


def test_a_trace_in_a_folder_that_is_not_there_is_refused_by_the_name_of_its_setting(make_model, tmp_path):
    with pytest.raises(ValueError, match=r"^trace: the file cannot be created: .*nowhere"):
        Engine(make_model("qwen3"), EngineConfig(kv_cache="64 blocks", trace=str(tmp_path / "nowhere" / "t.json")))


def test_a_full_disk_ends_the_trace_and_not_the_engine(make_model, caplog, tmp_path):
    settings = EngineConfig(kv_cache="64 blocks", max_num_seqs=8, trace="/dev/full")
    engine = Engine(make_model("qwen3"), settings)
    assert not engine.state()["trace"]["is_on"]
    assert all(len(c.token_ids) == 12 for c in engine.generate([[1, 2, 3]] * 40, PARAMS))
    report = engine.state()["trace"]
    assert (report["path"], report["num_failures"]) == ("/dev/full", 1)
    assert report["failure"] == "/dev/full cannot be written: No space left on device"
    assert [record.getMessage() for record in caplog.records if "trace" in record.name] == [
        f"the trace has ended, the engine goes on: {report['failure']}"
    ]
    assert engine.driver.start_trace(tmp_path / "t.json")
    engine.close()
    assert read(tmp_path / "t.json") and engine.state()["trace"]["failure"] is None


def test_a_disk_that_fills_up_later_ends_the_trace_once(tmp_path, caplog):
    trace = Trace(tmp_path / "t.json")
    with no_file_above(100_000):
        for _ in range(3000):
            trace.instant("event", text="x" * 50)
    trace.instant("lost")
    trace.flush()
    trace.close()
    assert (trace.is_on, trace.num_failures, len(caplog.records)) == (False, 1, 1)
    assert (tmp_path / "t.json").stat().st_size <= 100_000
