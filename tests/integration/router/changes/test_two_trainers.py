"""Two trainers, one through a router and one at a worker, aborts of others, and processes that are killed or stopped at
random: afterwards every worker serves whole weights, and the router names what differs until one push mends it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from lockstep.tests.integration.router.changes.pushing_trainer import weights
from lockstep.tests.integration.router.test_engines import START_S, Process
from lockstep.tests.integration.router.test_rolling_restart import folder, two_engines  # noqa: F401  a fixture
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import wait_until
from lockstep.tests.support.forked_ranks import free_port
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.same_host.segment import remove_stale_segments

pytestmark = pytest.mark.slow

ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}}


class Trainer:
    """A process that pushes until it is killed."""

    def __init__(self, url: str, folder: Path, segments: Path, first: int) -> None:  # noqa: F811
        command = [sys.executable, "-m", "lockstep.tests.integration.router.changes.pushing_trainer"]
        self._command = [*command, url, str(folder), str(segments)]
        self._first = first
        self.told: list[str] = []
        self.start()

    def start(self) -> None:
        self._first += 1000
        command = [*self._command, str(self._first)]
        self.process = prepared_python.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.told.append(line.strip())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)


def journal_of(url: str) -> dict:
    return httpx.get(f"{url}/weight_update_journal", timeout=START_S).json()


def standing(url: str) -> tuple[str, str | None]:
    info = httpx.get(f"{url}/server_info?name_weights=1", timeout=START_S).json()
    return info["weight_version"], info["weight_digest"]


class Chaos:
    """Kills, stops and aborts of one seed."""

    def __init__(self, seed: int, router: Process, engines: list[Process], trainers: list[Trainer]) -> None:
        self._random = random.Random(seed)
        self._router, self._engines, self._trainers = router, engines, trainers
        self.done: list[str] = []

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            threading.Event().wait(self._random.uniform(0.05, 1.5))  # the time of an event is a part of the draw
            kind = self._random.choice(["abort", "abort", "trainer", "trainer", "stop a trainer", "worker", "router"])
            self.done.append(kind)
            if kind == "abort":
                url = self._random.choice([self._router.url, *(one.url for one in self._engines)])
                httpx.post(f"{url}/abort_weight_update", json={"why": "an operator"}, timeout=START_S)
            elif kind == "stop a trainer":
                self._stop(self._random.choice(self._trainers))
            else:
                found = {"trainer": self._trainers, "worker": self._engines, "router": [self._router]}[kind]
                self._restart(self._random.choice(found))

    def _stop(self, trainer: Trainer) -> None:
        trainer.signal(signal.SIGSTOP)
        threading.Event().wait(self._random.uniform(0.1, 1.0))
        trainer.signal(signal.SIGCONT)

    def _restart(self, one: Process | Trainer) -> None:
        one.kill()
        one.start()
        if isinstance(one, Process):
            one.ready()


def check(seed: int, num_events: int, folder: Path, tmp_path: Path, shm: Path) -> None:  # noqa: F811
    with two_engines(folder, "kv_cache=64 blocks", "max_num_seqs=4") as engines:
        router = Process(
            "route", "--port", str(free_port()), "--journal", str(tmp_path / "journal.json"), "--worker",
            *(one.url for one in engines), "--setting", "health_interval_s=0.1", "health_timeout_s=5",
        )  # fmt: skip
        router.url = router.ready()
        trainers = [Trainer(router.url, folder, shm, 0), Trainer(engines[1].url, folder, shm, 500_000)]
        chaos = Chaos(seed, router, engines, trainers)
        try:
            wait_until(
                lambda: any("pushed" in line for one in trainers for line in one.told), START_S, "a push has landed"
            )
            chaos.run(num_events)
            for trainer in trainers:
                trainer.kill()
            settle(router, engines, folder, tmp_path, shm)
        except BaseException as error:
            error.add_note(f"seed {seed}: {chaos.done}; {[one.told[-3:] for one in trainers]}")
            raise
        finally:
            for trainer in trainers:
                trainer.kill()
            router.kill()
            remove_stale_segments(shm)


def settle(router: Process, engines: list[Process], folder: Path, tmp_path: Path, shm: Path) -> None:  # noqa: F811
    """Check the weights of each worker after the last trainer was killed, and that one update mends what differs."""
    for engine in engines:  # none waits for a pause or a session of a trainer that is gone
        wait_until(
            lambda engine=engine: not httpx.get(f"{engine.url}/is_paused").json()["is_paused"], START_S, "it goes on"
        )
        answer = httpx.post(f"{engine.url}/generate", json=ASK, timeout=START_S)
        version, digest = standing(engine.url)
        assert answer.json()["meta_info"]["weight_version"] == version
        whole = AutoModelForCausalLM.from_pretrained(folder) if version == "default" else weights(folder, version)
        assert digest == model_digest(whole.named_parameters()), f"{engine.url} has torn weights of {version}"
    wait_until(
        lambda: not journal_of(router.url)["entry"] or journal_of(router.url)["unresolved"], START_S, "it is judged"
    )
    found = {standing(engine.url) for engine in engines}
    entry = journal_of(router.url)["entry"]
    workers = httpx.get(f"{router.url}/workers", timeout=START_S).json()["workers"]
    assert len(found) == 1 or entry is not None or not all(one["is_routable"] for one in workers), workers
    newer = weights(folder, "999999")
    newer.save_pretrained(tmp_path / "newer")
    body = {"model_path": str(tmp_path / "newer"), "weight_version": "999999"}
    mended = httpx.post(f"{router.url}/update_weights_from_disk", json=body, timeout=START_S)
    if mended.status_code != 200:  # the router has said what an operator has to do
        assert "/weight_update_journal/resolve" in mended.json()["message"], mended.text
        httpx.post(
            f"{router.url}/weight_update_journal/resolve", json={"acknowledge": True, "enable": True}, timeout=START_S
        ).raise_for_status()
        httpx.post(f"{router.url}/update_weights_from_disk", json=body, timeout=START_S).raise_for_status()
    assert journal_of(router.url)["entry"] is None
    assert {standing(engine.url) for engine in engines} == {("999999", model_digest(newer.named_parameters()))}
    assert httpx.post(f"{router.url}/generate", json=ASK, timeout=START_S).status_code == 200


def test_two_trainers_that_are_killed_and_aborted_leave_whole_weights_and_no_worker_waiting(folder, tmp_path, shm):  # noqa: F811
    check(0, 6, folder, tmp_path, shm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 9))
def test_so_do_two_trainers_of_many_seeds(folder, tmp_path, shm, seed):  # noqa: F811
    check(seed, 25, folder, tmp_path, shm)
