"""The router's parts that need no network: balance, groups, the journal, common parts of answers, settings."""

from __future__ import annotations

import errno
import json
import math
import os
import ssl
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.integration.http.edge.config import HttpConfig
from lockstep.integration.router.changes.broadcast import Result, common, summarise
from lockstep.integration.router.changes.journal import JournalEntry, JournalUnwritable, TargetRecord, UpdateJournal
from lockstep.integration.router.config import RouterConfig, worker_url
from lockstep.integration.router.fleet.balance import PrefixTable, WorkerLoad, choose, num_sequences, prompt_keys
from lockstep.integration.router.fleet.groups import rank_offsets
from lockstep.integration.router.fleet.roster import Roster, RosterUnwritable
from lockstep.integration.router.fleet.worker import Health, Hold, Worker
from lockstep.integration.router.fleet.workers import WorkerRegistry
from lockstep.integration.router.wire import KEPT_S, Wire
from lockstep.tests.support.full_disks import no_file_above

# -- connections -----------------------------------------------------------------------------------------------------


def test_a_kept_connection_is_given_up_well_before_its_worker_closes_it():
    """A worker that closes it while a call is sent would cut that call off, and look dead."""
    pool = Wire(ssl.create_default_context(), 5.0, num_kept=4)._transport._pool
    assert pool._keepalive_expiry == KEPT_S <= HttpConfig().idle_timeout_s / 2


# -- balance ---------------------------------------------------------------------------------------------------------


def test_the_least_loaded_worker_is_chosen_and_among_equals_who_got_fewer():
    assert choose([WorkerLoad("a", 3), WorkerLoad("b", 1), WorkerLoad("c", 2)], (), 8) == "b"
    assert choose([WorkerLoad("a", 1, 10), WorkerLoad("b", 1, 9), WorkerLoad("c", 1, 11)], (), 8) == "b"


def test_who_knows_the_prompt_is_chosen_until_it_is_too_busy():
    loads = [WorkerLoad("a", 8), WorkerLoad("b", 0)]
    assert choose(loads, ("a",), 8) == "a"
    assert choose([WorkerLoad("a", 9), WorkerLoad("b", 0)], ("a",), 8) == "b"
    assert choose(loads, ("a", "gone"), 8) == "a"
    assert choose([WorkerLoad("a", 3), WorkerLoad("b", 2), WorkerLoad("c", 0)], ("a", "b"), 8) == "b"


def test_a_group_meets_its_prompt_and_spills_over_only_beyond_the_slack():
    table, running, slack = PrefixTable(100), {"a": 0, "b": 0}, 4
    keys = prompt_keys({"input_ids": list(range(200))})
    went = []
    for _ in range(12):
        loads = [WorkerLoad(name, count) for name, count in running.items()]
        went.append(choose(loads, table.knowing(keys), slack))
        running[went[-1]] += 1
        table.record(keys, went[-1])
    assert went[:5] == ["a"] * 5 and went[5] == "b"
    assert abs(running["a"] - running["b"]) <= slack


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sets(st.integers(0, 7)),
    st.integers(0, 10),
)
def test_nobody_is_chosen_who_is_more_than_the_slack_ahead(running, knowing, slack):
    loads = [WorkerLoad(str(i), count) for i, count in enumerate(running)]
    chosen = int(choose(loads, {str(i) for i in knowing}, slack))
    assert running[chosen] <= min(running) + slack
    near = [i for i in knowing if i < len(running) and running[i] <= min(running) + slack]
    assert chosen in near or not near


def test_a_longer_prompt_knows_whoever_had_its_beginning():
    table = PrefixTable(1000)
    first_turn = list(range(128))
    table.record(prompt_keys({"input_ids": first_turn}), "a")
    table.record(prompt_keys({"input_ids": [7] * 128}), "b")
    assert table.knowing(prompt_keys({"token_ids": [7] * 128})) == ("b",), "vLLM's name"
    assert table.knowing(prompt_keys({"input_ids": [*first_turn, 1, 2, 3]})) == ("a",)
    assert table.knowing(prompt_keys({"input_ids": [8] * 128})) == ()
    chat = [{"role": "user", "content": "hi"}]
    table.record(prompt_keys({"messages": chat}), "b")
    assert table.knowing(prompt_keys({"messages": [*chat, {"content": "ho", "role": "assistant"}]})) == ("b",)


def test_salts_adapters_and_images_share_no_prefix():
    others = ({}, {"cache_salt": "x"}, {"lora_path": "x"}, {"image_data": "x"}, {"image_data": ["y"]})
    assert len({prompt_keys({"text": "hello", **more})[0] for more in others}) == 5


def test_the_prefix_table_is_bounded_and_forgets_a_worker():
    table = PrefixTable(3)
    for i in range(5):
        table.record(prompt_keys({"text": f"prompt {i}"}), "a")
    assert len(table) == 3
    assert table.knowing(prompt_keys({"text": "prompt 0"})) == ()
    table.record(prompt_keys({"text": "prompt 4"}), "b")
    table.forget("a")
    assert len(table) == 1 and table.knowing(prompt_keys({"text": "prompt 4"})) == ("b",)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"text": "a"}, 1),
        ({"input_ids": [1, 2, 3]}, 1),
        ({"input_ids": [[1], [2]], "sampling_params": {"n": 3}}, 6),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"text": ["a", "b", "c"], "sampling_params": [{}]}, 3),
        ({"n": -5, "text": 7}, 1),
        ({"n": True, "messages": []}, 1),
    ],
)
def test_sequences_of_a_request_are_counted(body, expected):
    assert num_sequences(body) == expected


def test_strange_prompts_have_no_keys_and_harm_nobody():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for prompt in (None, 7, {}, [], [None], [["a"], 3], deep):
        assert isinstance(prompt_keys({"input_ids": prompt}), tuple)
    assert prompt_keys({"messages": [deep]}) == ()
    assert prompt_keys({"text": "\ud800"})


# -- groups ----------------------------------------------------------------------------------------------------------


def test_ranks_are_dealt_out_one_worker_after_the_other():
    assert rank_offsets([1, 2, 1], 1, 5) == [1, 2, 4]
    assert rank_offsets([2, 2], 3, 9) == [3, 5]
    with pytest.raises(ValueError, match="world_size 3 is too small: 2 workers with 1 \\+ 2 ranks"):
        rank_offsets([1, 2], 1, 3)
    with pytest.raises(ValueError, match="rank_offset must be at least 1"):
        rank_offsets([1], 0, 3)


# -- common parts of answers -----------------------------------------------------------------------------------------


def test_common_values_are_lifted_at_every_depth():
    one = {"paused": True, "weight_update": {"state": "open", "bytes": 1}, "n": 1, "none": None, "only": 1}
    two = {"paused": True, "weight_update": {"state": "open", "bytes": 2}, "n": True, "none": None}
    assert common([one, two]) == {"paused": True, "weight_update": {"state": "open"}, "none": None}


def answers(*pairs: tuple[int | None, object]) -> list[Result]:
    return [
        Result(Worker(f"http://w{i}", str(i)), status, body, None if status else "gone", bool(status))
        for i, (status, body) in enumerate(pairs)
    ]


def test_one_status_stands_for_all():
    assert summarise(answers((200, {"message": "ok"}), (200, None)))[0] == 200
    done = {"success": True, "version": "3"}
    status, body = summarise(answers((200, done), (200, {**done, "seconds": 1.5})))
    assert status == 200 and body["version"] == "3" and len(body["results"]) == 2
    refused = {"success": False, "error": {"message": "no", "type": "SessionError"}}
    status, body = summarise(answers((400, refused), (400, refused)))
    assert status == 400
    assert body["error"] == {"message": "no", "type": "SessionError", "param": None, "code": "SessionError"}
    status, body = summarise(answers((200, {}), (400, refused)))
    assert status == 502 and body["success"] is False and not body["retryable"]
    assert "http://w1: no" in body["message"]
    status, body = summarise(answers((200, {}), (200, {"success": False, "message": "no"})))
    assert status == 502
    assert summarise(answers((501, {}), (501, {})))[0] == 501
    status, body = summarise(answers((200, {}), (None, None)))
    assert status == 502 and body["retryable"]


# -- the journal -----------------------------------------------------------------------------------------------------

ENTRY = JournalEntry("update_weights_from_disk", time.time(), (TargetRecord("http://a:1", True, "4"),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.json"


def test_an_entry_survives_the_router_and_is_then_unresolved(path):
    journal = UpdateJournal(path)
    journal.write(ENTRY)
    assert not journal.is_unresolved
    journal.close()
    journal = UpdateJournal(path)
    assert journal.is_unresolved
    assert journal.entry.targets == ENTRY.targets and "ended in the middle" in journal.entry.failure
    assert journal.entry.concerns("http://a:1") and not journal.entry.concerns("http://b:1")
    journal.clear()
    journal.close()
    journal = UpdateJournal(path)
    assert journal.entry is None
    journal.close()


def test_only_the_owner_can_read_it(path):
    old = os.umask(0)
    try:
        journal = UpdateJournal(path)
        journal.write(ENTRY)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    journal.close()


def test_a_folder_that_everybody_can_write_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="everybody can write there"):
        UpdateJournal(folder / "journal.json")


def test_two_routers_cannot_share_a_journal(path):
    journal = UpdateJournal(path)
    with pytest.raises(ValueError, match="another router uses"):
        UpdateJournal(path)
    journal.close()
    UpdateJournal(path).close()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"verb": "x"}', '{"targets": [{"nope": 1}]}', '{"targets": 3}', "[" * 100_000]
)
def test_a_journal_that_cannot_be_read_concerns_everybody(path, text):
    path.parent.mkdir()
    path.write_text(text)
    journal = UpdateJournal(path)
    assert journal.is_unresolved and journal.entry.concerns("http://anybody")
    journal.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"started_at": None}, {"started_at": "now"}, {"started_at": math.nan}, {"started_at": 10**400},
        {"started_at": True}, {"verb": None}, {"session": 1}, {"failure": 3}, {"url": None}, {"disabled": None},
        {"weight_version": 4}, {"process": []},
    ],
    ids="{!s:.24}".format,
)  # fmt: skip
def test_a_journal_with_values_of_other_kinds_names_them_and_has_an_age(path, wrong):
    path.parent.mkdir()
    target = {"url": "http://a:1", "disabled": False, "weight_version": "4", "process": 1.5}
    values = {"verb": "x", "started_at": 5.0, "session": False, "failure": None}
    for part in (target, values):
        part |= {name: value for name, value in wrong.items() if name in part}
    path.write_text(json.dumps(values | {"targets": [target]}))
    journal = UpdateJournal(path)
    assert next(iter(wrong)) in journal.entry.failure and journal.entry.concerns("http://anybody")
    assert journal.entry.age_s >= 0 and journal.report()["unresolved"]
    journal.close()


def test_a_journal_that_is_a_folder_is_named_and_its_lock_is_released(path):
    path.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(IsADirectoryError, match=r"journal\.json"):
            UpdateJournal(path)


def test_a_journal_on_a_file_system_without_locks_is_named(path, monkeypatch):
    def no_locks(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match=r"the journal .*journal\.json cannot be locked .No locks available.: choose"):
        UpdateJournal(path)


def test_a_journal_that_cannot_be_written_says_so_and_keeps_the_old_entry(path):
    journal = UpdateJournal(path)
    journal.write(ENTRY)
    path.with_name(f"{path.name}.part").mkdir()  # stops root too: a file cannot replace a folder
    with pytest.raises(JournalUnwritable, match="cannot be written"):
        journal.write(JournalEntry("other", 0.0, ()))
    assert journal.entry == ENTRY and json.loads(path.read_text())["verb"] == ENTRY.verb
    journal.fail("worker b is gone")
    journal.save()
    assert journal.is_unresolved
    journal.close()


def test_a_full_disk_keeps_the_old_entry_and_leaves_no_part(path):
    journal = UpdateJournal(path)
    journal.write(ENTRY)
    with no_file_above(20), pytest.raises(JournalUnwritable, match="File too large"):
        journal.write(JournalEntry("other", 0.0, ()))
    assert journal.entry == ENTRY and json.loads(path.read_text())["verb"] == ENTRY.verb
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    journal.close()


# -- the roster ------------------------------------------------------------------------------------------------------

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_the_roster_is_the_command_line_with_what_was_changed(path):
    path.parent.mkdir()
    roster = Roster(path, (A, B))
    assert roster.changes.workers == (A, B) and not path.exists()
    roster.add(C, disabled=True)
    roster.remove(A)
    roster.set_disabled([B], True)
    changes = Roster(path, (A, B)).changes
    assert (changes.workers, changes.disabled) == ((B, C), (C, B))
    assert Roster(path, (A, B, C)).changes.workers == (B, C)
    assert Roster(path, (B,)).changes.workers == (B, C)
    roster = Roster(path, (A, B))
    roster.add(A, disabled=False)
    roster.remove(C)
    roster.set_disabled([B], False)
    changes = Roster(path, (A, B)).changes
    assert (changes.workers, changes.disabled) == ((A, B), ())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_url_that_is_new_on_the_command_line_was_not_removed(path):
    path.parent.mkdir()
    Roster(path, (A, B)).remove(A)
    Roster(path, (B,)).add(C, disabled=False)  # written with the new command line
    assert Roster(path, (A, B)).changes.workers == (A, B, C)


@pytest.mark.parametrize("text", ["", "[]", '{"added": 3}', '{"nope": []}', '{"added": ["ftp://x"]}', "[" * 100_000])
def test_a_roster_that_cannot_be_read_is_refused_with_the_remedy(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match="delete it"):
        Roster(path, (A,))


def test_a_change_that_cannot_be_written_is_not_made(path):
    path.parent.mkdir()
    roster = Roster(path, (A,))
    path.with_name(f"{path.name}.part").mkdir()
    with pytest.raises(RosterUnwritable, match="cannot be written"):
        roster.remove(A)
    assert roster.changes.workers == (A,)


def test_a_router_on_any_free_port_without_a_journal_of_its_own_remembers_no_workers(path):
    assert RouterConfig((), HttpConfig(port=0)).roster_path is None
    assert RouterConfig((), HttpConfig(port=0), journal=path).roster_path == path.with_name(f"{path.name}.workers.json")
    assert RouterConfig((), HttpConfig(port=30080)).roster_path.parent == RouterConfig().journal_path.parent
    roster = Roster(None, (A,))
    roster.remove(A)
    assert roster.changes.workers == ()


# -- workers and settings --------------------------------------------------------------------------------------------


def test_workers_are_held_for_versions_that_differ_until_they_agree():
    registry = WorkerRegistry()
    a, b, c = (registry.add(f"http://w:{port}")[0] for port in (1, 2, 3))
    for worker, version in ((a, "5"), (b, "5"), (c, "4")):
        worker.weight_version, worker.health = version, Health.ALIVE
    registry.check_versions(allow_mixed=False, returned=c)
    assert Hold.VERSION in c.holds and "'4'" in c.holds[Hold.VERSION] and not a.holds
    registry.check_versions(allow_mixed=False)
    assert Hold.VERSION in c.holds
    a.health = b.health = Health.DEAD
    registry.check_versions(allow_mixed=False)
    assert "last served '5'" in c.holds[Hold.VERSION]
    registry.set_disabled(c, False)  # an operator accepts its version
    assert c.can_take_requests and registry.served_version == "4"
    registry.check_versions(allow_mixed=False, returned=c)
    a.health = Health.ALIVE
    registry.check_versions(allow_mixed=True, returned=a)
    assert a.can_take_requests


def test_urls_have_one_form_and_what_is_none_is_refused():
    assert worker_url(" 127.0.0.1:30000 ") == "http://127.0.0.1:30000"
    assert worker_url("http://[::1]:8/") == "http://[::1]:8"
    registry = WorkerRegistry()
    first, is_new = registry.add("http://h:1/")
    assert is_new and registry.add("h:1") == (first, False)
    assert registry.find("http://h:1") is registry.find(first.id) is first
    for wrong in (
        "",
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h:1/path",
        "http://h:99999",
        "http://h:1?x=1",
        "a b:1",
        3,
        None,
    ):
        with pytest.raises(ValueError, match="url"):
            worker_url(wrong)


def test_settings_that_are_wrong_are_all_named():
    with pytest.raises(ValueError, match=r"dead_after.*affinity_slack.*ftp") as error:
        RouterConfig(("ftp://x",), HttpConfig(port=0), dead_after=0, affinity_slack=-1)
    assert "lock_limit_s" not in str(error.value)
