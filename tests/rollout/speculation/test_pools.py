"""Drafts in small pools, with few rows and slots: they take what nobody wants, and change no schedule for the worse."""

from __future__ import annotations

from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.sequences.step import ScheduleOutput
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.rollout.speculation.conftest import VOCAB
from lockstep.tests.rollout.speculation.drafting import Case, Oracle, Play, counts, draft_always, outputs_of, play
from lockstep.tests.support.covering import covering

WAYS: dict[str, dict[str, object]] = {
    "plain": {}, "overlap": {"overlap": True}, "2 stages": {"stages": 2}, "3 stages": {"stages": 3},
}  # fmt: skip
STEM = [(11 * i + 3) % 900 for i in range(40)]
SMALL = {"kv_cache": "14 blocks", "max_num_seqs": 5, "max_num_batched_tokens": 40, "chunked_prefill_size": 11,
         "admission_ratio": 0.0}  # fmt: skip


def some_cases(num: int = 9, shift: int = 0) -> list[Case]:
    return [
        Case([(shift + kind % 3 + i * (1 + kind % 2)) % 900 for i in range(3 + 5 * kind)],
             SamplingParams(max_new_tokens=18 + 5 * (kind % 4), sampling_seed=kind, temperature=float(kind % 4 > 0)))
        for kind in range(num)
    ]  # fmt: skip


def schedules(engine: Engine) -> list[ScheduleOutput]:
    return [args[0] for name, args in engine.parts.managers.log if name == "on_schedule"]


def plan_of(engine: Engine) -> list[tuple]:
    """Return who ran with which rows in each step, and who gave way, without drafts."""
    return [
        ([(item.id, item.incarnation, item.start, item.num_tokens) for item in output.scheduled], output.preempted,
         output.ignored, output.exhausted)
        for output in schedules(engine)
    ]  # fmt: skip


@covering(1, way=["plain", "2 stages", "3 stages"], pool=[10, 9, 12, 14])
def test_wrong_drafts_change_no_schedule(make_engine, way, pool):
    settings = {**SMALL, **WAYS[way], "kv_cache": f"{pool} blocks"}
    off = make_engine(speculation="off", **settings)
    expected, plan = play(off, some_cases()), plan_of(off)
    engine = make_engine(**settings)
    draft_always(engine, Oracle(outputs_of(expected), VOCAB, "wrong"), depth=20)
    assert play(engine, some_cases()) == expected
    assert plan_of(engine) == plan
    assert any(preempted for _, preempted, _, _ in plan)
    drafted, accepted, _ = counts(engine)
    assert drafted > 100 and accepted == 0
    off.close()
    engine.close()


@covering(1, way=WAYS, pool=[9, 10, 12, 14, 20], spoil=["right", "part"])
def test_far_fewer_steps_and_no_more_preemptions_than_without_drafts(make_engine, way, pool, spoil):
    settings = {**SMALL, **WAYS[way], "kv_cache": f"{pool} blocks"}
    found = {}
    expected: dict[str, tuple] = {}
    for speculation in ("off", "auto"):
        engine = make_engine(speculation=speculation, **settings)
        if speculation == "auto":
            draft_always(engine, Oracle(outputs_of(expected), VOCAB, spoil), depth=20)
        records = play(engine, some_cases())
        assert records == (expected or records)
        expected = records
        found[speculation] = sum(len(o.preempted) for o in schedules(engine)), len(schedules(engine))
        if speculation == "auto":
            assert counts(engine)[1] > 40
            assert all(output.num_rows <= 40 for output in schedules(engine))
        engine.close()
    # With stages accepted tokens come at other times, so that others meet in the pool: there is one more in one case.
    may_meet_others = engine.parts.runner.num_stages > 1 and pool == 9
    assert found["auto"][0] <= found["off"][0] + may_meet_others and found["auto"][1] < 0.7 * found["off"][1], found


@covering(1, way=WAYS, rows=[5, 6, 9, 40], family=["qwen3", "lfm2"])
def test_drafts_take_the_rows_that_are_left(make_engine, way, rows, family):
    settings = {**SMALL, **WAYS[way], "max_num_batched_tokens": rows, "chunked_prefill_size": None}
    off = make_engine(family, speculation="off", **settings)
    expected = play(off, some_cases())
    engine = make_engine(family, **settings)
    draft_always(engine, Oracle(outputs_of(expected), VOCAB))
    assert play(engine, some_cases()) == expected
    assert all(output.num_rows <= rows for output in schedules(engine))
    assert counts(engine)[1] > 5 or (way, family) == ("3 stages", "lfm2")  # all slots may be wanted by steps ahead
    off.close()
    engine.close()


@covering(1, rest="slow", way=["plain", "3 stages", "overlap", "2 stages"], snapshots=[0, 9])
def test_slots_of_states_suffice_for_prompts_that_come_beside_a_draft(make_engine, way, snapshots):
    """Prompts of several chunks take slots while a draft is in flight, in each of the stages."""
    settings = {"max_num_seqs": 4, "state_snapshots": snapshots, "chunked_prefill_size": 5, **WAYS[way]}
    late = [Case([(k + 3 * i) % 900 for i in range(30)], SamplingParams(max_new_tokens=9)) for k in range(3)]
    found = []
    for speculation in ("off", "auto"):
        engine = make_engine("lfm2", speculation=speculation, **settings)
        if found:
            draft_always(engine, Oracle(outputs_of(found[0]), VOCAB), depth=20)
        run = Play(engine)

        def arrive(run: Play) -> None:
            if run.num_steps in (4, 5):
                run.add(late[:1] if run.num_steps == 4 else late[1:], f"late{run.num_steps} ")

        with engine.model.rollout_phase():
            run.add([Case(STEM[:4], SamplingParams(max_new_tokens=160, sampling_seed=1))])
            found.append(run.to_the_end(arrive))
        if len(found) > 1 and (snapshots or way != "3 stages"):  # else all slots may be wanted by steps ahead
            assert counts(engine)[1] > 5
        engine.close()
    assert found[0] == found[1]


@covering(1, family=["qwen3", "lfm2", "qwen3_5"], way=["plain", "overlap", "2 stages"], spoil=["right", "part"])
def test_what_a_drafted_output_leaves_in_the_cache_is_what_others_find(make_engine, family, way, spoil):
    """Later requests go on from drafted outputs, their blocks and snapshots, at several places."""
    if (family, way) == ("qwen3_5", "2 stages"):
        needs_transformers(5, 23)  # an older one asks for other position ids in a later stage
    first = [Case(STEM[: 9 + 3 * n], SamplingParams(max_new_tokens=50, sampling_seed=n)) for n in range(3)]
    off = make_engine(family, speculation="off")
    expected = play(off, first)
    engine = make_engine(family, **WAYS[way])
    draft_always(engine, oracle := Oracle(outputs_of(expected), VOCAB, spoil))
    assert play(engine, first) == expected
    later = [
        Case([*record[0], *record[2][:num], *([7] * (num % 3))], SamplingParams(max_new_tokens=12, sampling_seed=num))
        for num in (20, 35, 49, 50) for record in expected.values()
    ]  # fmt: skip
    fresh = make_engine(family, speculation="off", prefix_cache=False)
    wanted = play(fresh, later, "later")
    oracle.outputs = outputs_of(wanted)
    run = Play(engine)
    with engine.model.rollout_phase():
        run.add(later, "later")
        assert run.to_the_end() == wanted
    num_cached = [answer.num_cached_tokens for answer in run.answers.values()]
    assert sum(num > 9 + 16 for num in num_cached) >= 4  # blocks of outputs, not only of prompts
    assert counts(engine)[1] > 100
    for one in (off, engine, fresh):
        one.close()
