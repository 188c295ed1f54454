"""An engine in a process of its own: its socket, pushes to it, and its start and end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.integration.plain_values import plain
from lockstep.integration.push.local_target import LocalTarget, run_verb
from lockstep.integration.push.pusher import WeightPusher
from lockstep.integration.push.remote_engine import RemoteEngine, RemoteTarget, VerbServer
from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transports.delta import DeltaTransport
from lockstep.weight_sync.transports.disk import DiskTransport
from lockstep.weight_sync.transports.group import DistributedTransport
from lockstep.weight_sync.transports.same_host import TensorTransport

PATIENCE = 30.0  # seconds; far more than any wait here takes
START_S = 150.0  # time for a process that imports everything, on a busy machine
SETTINGS = {"kv_cache": "16 blocks", "max_num_seqs": 4}
PROMPT = [3, 14, 15, 92]


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder with a short name: a Unix socket's path has 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-"))
    yield path
    shutil.rmtree(path)


# -- the socket --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder) -> Iterator[VerbServer]:
    """Serve verbs that return their arguments, or fail on request."""
    errors = {"ValueError": ValueError, "KeyError": KeyError}

    def run(verb: str, timeout_s: float, arguments: dict[str, object]) -> dict[str, object]:
        if verb in errors:
            raise errors[verb]("as asked")
        if verb == "meet":
            assert barrier.wait(PATIENCE) >= 0
        return {"verb": verb, "timeout_s": timeout_s, **arguments}

    barrier = threading.Barrier(2)
    server = VerbServer(folder / "engine.sock", run)
    server.start()
    yield server
    server.close()


def test_a_verb_travels_with_its_arguments_and_its_answer_comes_back(server, folder):
    target = RemoteTarget(folder / "engine.sock")
    assert target.name == "engine.sock"
    answer = target.call("look", timeout_s=5.0, names=["ä", "b"], big="x" * 300_000)
    assert answer == {"verb": "look", "timeout_s": 5.0, "names": ["ä", "b"], "big": "x" * 300_000}


@pytest.mark.parametrize("kind", ["ValueError", "KeyError"])
def test_an_error_there_is_an_error_here_and_names_target_verb_and_kind(server, folder, kind):
    with pytest.raises(TargetError, match=f"e7: {kind}: .*as asked") as failed:
        RemoteTarget(folder / "engine.sock", "e7").call(kind, timeout_s=PATIENCE)
    assert (failed.value.kind, failed.value.verb, failed.value.target) == (kind, kind, "e7")


def test_calls_of_two_threads_overlap(server, folder):
    target, answers = RemoteTarget(folder / "engine.sock"), []
    threads = [
        threading.Thread(target=lambda: answers.append(target.call("meet", timeout_s=PATIENCE))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 2


def test_a_caller_that_says_nothing_or_nonsense_hurts_nobody(server, folder):
    for said in (b"", b"half a line", b"no json\n", b"[1]\n", b'{"verb": "look"}\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / "engine.sock"))
            connection.sendall(said)
    assert RemoteTarget(folder / "engine.sock").call("look", timeout_s=PATIENCE)["verb"] == "look"


def test_only_its_owner_may_connect(server, folder):
    assert os.stat(folder / "engine.sock").st_mode & 0o077 == 0


def test_a_target_that_is_not_there_or_breaks_off_is_an_error(folder):
    with pytest.raises(TargetError, match="e7: look: no answer") as failed:
        RemoteTarget(folder / "nobody.sock", "e7").call("look", timeout_s=1.0)
    assert failed.value.kind == ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "broken.sock"))
        listener.listen()

        def break_off() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b'{"result": {"half')
            connection.close()

        thread = threading.Thread(target=break_off, daemon=True)
        thread.start()
        with pytest.raises(TargetError, match="without an answer"):
            RemoteTarget(folder / "broken.sock").call("look", timeout_s=PATIENCE)
        thread.join(PATIENCE)


def test_a_service_answers_every_verb_in_plain_values_and_refuses_what_is_none(make_model):
    import json

    service = RolloutService(Engine(make_model("qwen2"), EngineConfig(**SETTINGS)))
    target = LocalTarget(service, "e0")
    for verb, arguments in {
        "state": {},
        "pause_generation": {"mode": "retract"},
        "flush_cache": {},
        "begin_weight_update": {"weight_version": "5"},
        "abort_weight_update": {},
        "continue_generation": {},
        "get_weight_version": {},
        "weights_checker": {"action": "checksum"},
        "release_memory_occupation": {"tags": ["kv_cache"]},
        "resume_memory_occupation": {"tags": ["kv_cache"]},
    }.items():
        json.dumps(target.call(verb, timeout_s=PATIENCE, **arguments))
    with pytest.raises(TargetError, match="unknown verb") as failed:
        target.call("close", timeout_s=PATIENCE)
    assert failed.value.kind == "ValueError"
    with pytest.raises(ValueError, match="unknown verb"):
        run_verb(service, "__init__", PATIENCE, {})
    assert plain({1: (Path("/a"), {"b"})}) == {"1": ["/a", ["b"]]}
    service.close()


# -- separate processes ------------------------------------------------------------------------------------------------


def train(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((torch.rand_like(parameter) < 0.05) * 0.1)


def greedy(model: nn.Module, num_tokens: int) -> list[int]:
    ids = list(PROMPT)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.slow
def test_pushes_over_every_transport_reach_a_separate_process_and_one_in_this(make_model, folder):
    model = make_model("qwen2")
    model.save_pretrained(folder / "model")
    remote = RemoteEngine(folder / "model", folder, "remote", SETTINGS, timeout_s=START_S)
    service = RolloutService(Engine(folder / "model", EngineConfig(**SETTINGS)))
    transports = [
        DistributedTransport(bucket_bytes=1 << 16),
        TensorTransport(bucket_bytes=1 << 16),
        DiskTransport(folder / "updates"),
        DeltaTransport(TensorTransport(bucket_bytes=1 << 16)),
        DeltaTransport(DistributedTransport(bucket_bytes=1 << 16)),
    ]
    params = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    version = 0
    try:
        for transport in transports:
            pusher = WeightPusher([remote, LocalTarget(service)], transport, timeout_s=PATIENCE)
            for _ in range(2):
                version += 1
                train(model)
                digest = pusher.push(model, str(version)).digest
                state = remote.call("state", timeout_s=PATIENCE)
                checked = remote.call("weights_checker", timeout_s=PATIENCE, action="checksum")
                assert digest == model_digest(model.named_parameters()) == service.model_digest()
                assert (state["weight_version"], state["weight_digest"]) == (str(version), digest)
                assert checked["model_digest"] == digest
                [completion] = remote.generate([PROMPT], [params], PATIENCE)
                assert list(completion.token_ids) == greedy(model, 6)
                assert (completion.weight_version, completion.weight_digest) == (str(version), digest)
            pusher.close()
        with pytest.raises(TargetError, match="no_such") as failed:
            remote.call("update_weights_from_disk", timeout_s=PATIENCE, model_path=str(folder / "no_such"))
        assert failed.value.kind == "ValueError"
    finally:
        remote.close()
        service.close()
    remote.close()  # once more does nothing
    assert remote.process.returncode == 0  # its standard input ended
    assert not (folder / "remote.sock").exists()


@pytest.mark.slow
def test_an_engine_that_cannot_start_shows_the_end_of_its_log(folder):
    with pytest.raises(TargetError, match=r"broken: start: it ended[\s\S]*there is no model folder") as failed:
        RemoteEngine(folder / "nowhere", folder, "broken", SETTINGS, timeout_s=START_S)
    assert "Traceback" in str(failed.value)


@pytest.mark.slow
def test_an_engine_that_is_not_ready_in_time_is_ended(folder, make_model):
    make_model("qwen2").save_pretrained(folder / "model")
    with pytest.raises(TargetError, match="not ready within"):
        RemoteEngine(folder / "model", folder, "late", SETTINGS, timeout_s=0.05)


HOLDER = """
import sys
from pathlib import Path
from lockstep.weight_sync.same_host.segment import Segment
segment = Segment(Path("/dev/shm"), 4096)
print(segment.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_an_engine_whose_starter_was_killed_removes_its_segments_though_the_pipe_ends_before_their_locks(
    folder, make_model
):
    make_model("qwen2").save_pretrained(folder / "model")
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        segment = Path(starter.stdout.readline().strip())
        given = ["--starter", str(starter.pid)]
        remote = RemoteEngine(folder / "model", folder, "orphan", SETTINGS, given, timeout_s=START_S)
        try:
            remote.process.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                remote.process.wait(1)
            starter.kill()
            assert remote.process.wait(PATIENCE) == 0
        finally:
            remote.process.kill()
            starter.kill()
            segment_is_left = segment.exists()
            segment.unlink(missing_ok=True)
    assert not segment_is_left
