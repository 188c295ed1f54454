"""`make torture`: attack a server for a while, and say whether it held.

Prints a summary, and one JSON object on the last line. The exit code is 1 where a requirement was broken. The seed is
printed first; `--seed` repeats a storm and `--replay ATTACKER:STEP` single steps of it, which the report names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.tests.torture.answers import SeededAnswers
from lockstep.tests.torture.attackers import Attacker, Scene
from lockstep.tests.torture.bodies import Bodies, Crowds, Malformed
from lockstep.tests.torture.connections import Connections, Leavers
from lockstep.tests.torture.faults import Faults
from lockstep.tests.torture.own_server import OwnServer, Process
from lockstep.tests.torture.patterns import Patterns
from lockstep.tests.torture.rank import RankJob
from lockstep.tests.torture.report import report
from lockstep.tests.torture.schemas import AdminSchemas, Schemas
from lockstep.tests.torture.storm import Limits, Measures, Storm, WatchProcess, look_after, named_limits, warm_up
from lockstep.tests.torture.verbs import Verbs
from lockstep.tests.torture.wire import Address, exchange, request_bytes

ATTACKERS: tuple[type[Attacker], ...] = (
    Schemas, AdminSchemas, Patterns, Bodies, Crowds, Malformed, Connections, Leavers, Verbs, Faults,
)  # fmt: skip
NAMES = tuple(one.name for one in ATTACKERS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make torture", description="Attack a server, and check that it holds.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--attackers", help=f"some of {','.join(NAMES)}; default: all that the server allows")
    parser.add_argument("--replay", nargs="+", metavar="ATTACKER:STEP", help="take these steps only, one by one")
    parser.add_argument("--url", help="attack this server instead of one of our own")
    parser.add_argument("--api-key", default="", metavar="KEY")
    parser.add_argument("--admin-api-key", default="", metavar="KEY", help="without it nothing administrative is sent")
    parser.add_argument("--no-keys", action="store_true", help="with --url: the server has no keys; administer it")
    parser.add_argument("--pid", type=int, help="with --url: its process on this machine; its memory is watched then")
    parser.add_argument(
        "--model-path", default="", help="with --url: the folder that it may load its weights from again"
    )
    parser.add_argument(
        "--training-rank", action="store_true", help="attack the server inside a rank of a training job"
    )
    parser.add_argument(
        "--engine", nargs="+", default=[], metavar="NAME=VALUE", help="further settings of the engine of our own server"
    )
    parser.add_argument("--latency-s", type=float, default=2.0, help="limit of /health and /state; default 2")
    parser.add_argument(
        "--allowance-mib", type=int, help="memory beyond 1.2 x start; default: the server's named limits"
    )
    parser.add_argument(
        "--record", type=Path, help="file for the last requests; default: in the system's scratch folder"
    )
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    asked = {name.partition(":")[0] for name in options.replay or ()} or set(
        filter(None, (options.attackers or "").split(","))
    )
    if wrong := sorted(asked - set(NAMES)):
        parser.error(f"unknown attacker {', '.join(wrong)}; known: {', '.join(NAMES)}")
    options.names = asked or set(NAMES)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite. Returns the exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-torture-") as folder:
        result = _train(options, Path(folder)) if options.training_rank else _serve(options, Path(folder))
    return result


def _serve(options: argparse.Namespace, folder: Path) -> int:
    """Attack a server of our own or the one at --url."""
    own = None if options.url else OwnServer(folder, options.engine)
    try:
        load_attackers(options.names)
        scene = _foreign(options, folder) if own is None else _owned(own, options, folder)
        return _attack(scene, own, options)
    finally:
        if own is not None:
            own.end()


def load_attackers(names: set[str]) -> None:
    """Import the parts of attackers that take seconds to import: a server of our own starts meanwhile."""
    if "malformed" in names:
        importlib.import_module("lockstep.tests.integration.http.edge.test_malformed")
    if names & {"schemas", "admin_schemas"}:
        importlib.import_module("schemathesis")


def _owned(own: OwnServer, options: argparse.Namespace, folder: Path) -> Scene:
    address = own.wait()
    own.cap_memory()
    return Scene(address, describe(address), folder, options.seed, own=own, model_folder=str(own.model_folder))


def _foreign(options: argparse.Namespace, folder: Path) -> Scene:
    address = Address(options.url, options.api_key, options.admin_api_key)
    may_administer = bool(options.admin_api_key or options.no_keys)
    return Scene(address, describe(address), folder, options.seed, may_administer, model_folder=options.model_path)


def describe(address: Address) -> dict[str, Any]:
    """Read the OpenAPI document of a server. Raises ValueError where it has none."""
    answer = exchange(address, request_bytes("GET", "/openapi.json", key=address.api_key))
    found = answer.json()
    if answer.status != 200 or not isinstance(found, dict):
        raise ValueError(f"{address.url}/openapi.json: {answer.status} {answer.body[:200]!r}")
    return found


def _attack(scene: Scene, own: OwnServer | None, options: argparse.Namespace) -> int:
    answers = SeededAnswers(scene)
    answers.learn()
    warm_up(scene)
    pid = own.pid if own is not None else options.pid
    storm = Storm(scene, choose(scene, options.names), answers)
    limits = limits_of(scene, options)
    watch = WatchProcess(scene, limits, pid)
    try:
        storm.take(options.replay) if options.replay else storm.rage(60 * options.minutes)
    finally:
        measures = watch.end()
    if not scene.is_gone:
        measures.end = look_after(scene, answers, measures.start)
        _end(scene, own)
    log = own.folder / "server.log" if own is not None else None
    return finish(storm, measures, limits, options, dict(answers.counts), log)


def _end(scene: Scene, own: OwnServer | None) -> None:
    began = time.monotonic()
    if own is not None and (code := own.end()) != 0:
        scene.verdict.add("ending", f"SIGTERM after the storm: exit code {code} after {time.monotonic() - began:.1f} s")


def _train(options: argparse.Namespace, folder: Path) -> int:
    """Attack the server inside a training rank, and compare the job with an undisturbed one."""
    calm = RankJob(folder, "calm", options)
    calm.finish()
    with RankJob(folder, "storm", options) as job:
        address = job.wait_for_server()
        own = Process(job.rank_pid())
        scene = Scene(address, describe(address), folder, options.seed, is_admin_allowed=False, own=own, may_end=True)
        storm = Storm(scene, choose(scene, options.names - {"faults"}), None)
        limits = limits_of(scene, options)
        watch = WatchProcess(scene, limits, own.pid)
        try:
            storm.rage(60 * options.minutes, job.is_nearly_over)
        finally:
            measures = watch.end()
        job.finish(scene.verdict)
    job.compare(calm, scene.verdict)
    return finish(storm, measures, limits, options, {"steps of the job": len(job.digests())}, job.log)


def choose(scene: Scene, names: set[str]) -> list[Attacker]:
    """Make the chosen attackers that this server allows."""
    return [
        kind(scene, lane) for kind in ATTACKERS for lane in range(kind.num_lanes)
        if kind.name in names and (scene.is_admin_allowed or not kind.needs_admin)
        and (scene.own is not None or not kind.needs_own)
    ]  # fmt: skip


def limits_of(scene: Scene, options: argparse.Namespace) -> Limits:
    mib = options.allowance_mib
    return Limits(options.latency_s, sum(named_limits(scene).values()) if mib is None else mib << 20)


def finish(
    storm: Storm,
    measures: Measures,
    limits: Limits,
    options: argparse.Namespace,
    checked: dict[str, int],
    log: Path | None,
) -> int:
    """Print the report; where something was wrong, write the last requests, and the server's log beside them. Returns
    the exit code."""
    verdict = storm.scene.verdict
    path = None
    if verdict.listed:
        path = options.record or Path(tempfile.gettempdir()) / f"lockstep-torture-{options.seed}.jsonl"
        storm.scene.record.save(path)
        if log is not None:
            shutil.copy(log, path.with_suffix(".log"))
    result = report(storm, measures, limits, options, checked, path)
    print(json.dumps(result), flush=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes that we started end with us
    sys.exit(main())
