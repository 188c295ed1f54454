"""Faults at every message of vLLM's weight updates.

Each is a function of the stage, with the weights of a step to bring, and returns which weights are there afterwards:
"old", "new", or "either".
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import torch

from lockstep.tests.integration.http.vllm.weight_stage import PROMPT, SOON_S, Stage
from lockstep.tests.integration.http.vllm.weight_trainer import (
    KEY,
    PATIENCE,
    Named,
    Trainer,
    info_of,
    payloads,
)
from lockstep.tests.support import prepared_python
from lockstep.tests.support.callers import wait_until
from lockstep.tests.support.forked_ranks import free_port

PACKED = 20_000  # several buffers
Fault = Callable[[Stage], str]


def a_group_that_is_too_small(stage: Stage) -> str:
    info = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 2, "world_size": 2}
    refused = stage.post("/init_weight_transfer_engine", {"init_info": info}, 400)["error"]["message"]
    assert "world_size 2 has no place for a rank from rank 2 on" in refused
    return "old"


def a_trainer_that_never_hosts_its_group(stage: Stage) -> str:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    stage.post("/init_weight_transfer_engine", {"init_info": info, "timeout_s": 0.5}, 400)
    return "old"


def a_client_that_leaves_during_init(stage: Stage) -> str:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    group = "vllm_weight_transfer"
    _post_and_leave(stage, "/init_weight_transfer_engine", {"init_info": info},
                    lambda: stage.client.get("/state").json()["weight_groups"].get(group) == "joining")  # fmt: skip
    return "old"  # the next init must not wait for this one


def init_twice(stage: Stage) -> str:
    stage.trainer().leave()  # at its own end only: one process can have one group of a name
    second = stage.starts()
    assert second.send(stage.newer).status_code == 200
    second.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def start_while_requests_run(stage: Stage) -> str:
    trainer = stage.trainer()
    params = {"seed": 1, "ignore_eos": True}
    asked = trainer.begin("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    wait_until(lambda: stage.client.get("/state").json()["num_running"] == 1, SOON_S)
    trainer.post("/start_weight_update", status=400)
    trainer.post("/abort_requests")
    assert asked().json()["choices"][0]["finish_reason"] == "abort"
    return "old"


def start_twice(stage: Stage) -> str:
    trainer = stage.starts()
    trainer.post("/start_weight_update", status=400)
    stage.post("/start_draft_weight_update", status=400)
    assert trainer.send(stage.newer).status_code == 200
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def a_trainer_that_ends_after_start(stage: Stage) -> str:
    stage.starts().client.close()
    return "old"


def a_trainer_that_ends_after_an_update(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer[:5]).status_code == 200
    trainer.client.close()
    return "old"


def another_callers_start(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer[:5]).status_code == 200
    stage.post("/start_weight_update", status=400)
    stage.post("/begin_weight_update", status=400)
    assert trainer.send(stage.newer[5:]).status_code == 200
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def another_callers_update(stage: Stage) -> str:
    trainer = stage.starts()
    first = trainer.begin("/update_weights", {"update_info": info_of(stage.newer)})
    body = {"update_info": info_of(stage.newer)}
    wait_until(stage.is_updating, SOON_S)
    assert stage.client.post("/update_weights", json=body).status_code == 409
    trainer.broadcast(payloads(stage.newer))
    assert first().status_code == 200
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def another_trainers_init(stage: Stage) -> str:
    first = stage.starts()
    assert first.send(stage.newer[:5]).status_code == 200
    first.leave()
    stage.trainer()
    first.post("/finish_weight_update", status=400)
    return "old"


def an_update_without_start(stage: Stage) -> str:
    trainer = stage.trainer()
    _refused(trainer, {"update_info": info_of(stage.newer)}, stage.newer)
    return "old"


def _a_wrong_update(change: Callable[[dict], dict]) -> Fault:
    def fault(stage: Stage) -> str:
        trainer = stage.starts()
        assert trainer.send(stage.newer[:4]).status_code == 200
        _refused(trainer, {"update_info": change(info_of(stage.newer[4:]))}, stage.newer[4:])
        trainer.post("/finish_weight_update", status=400)
        return "old"

    return fault


def no_fields(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer[:4]).status_code == 200
    for body in ({}, {"update_info": []}, {"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}}):
        _refused(trainer, body, stage.newer[4:])
    trainer.post("/finish_weight_update", status=400)
    return "old"


def _refused(trainer: Trainer, body: dict, tensors: Named) -> None:
    """Announce what the server refuses, and broadcast all the same: that must end soon, not hang."""
    waiting, began = trainer.begin("/update_weights", body), time.monotonic()
    with contextlib.suppress(RuntimeError):  # unless all of it was in the buffers of the sockets
        trainer.broadcast(payloads(tensors))
    assert waiting().status_code == 400, waiting().text
    assert time.monotonic() - began < SOON_S


def _a_size_that_differs(factor: float) -> Fault:
    def fault(stage: Stage) -> str:
        trainer, tensors = stage.starts(), stage.newer
        waiting = trainer.begin("/update_weights", {"update_info": info_of(tensors)})
        name, big = max(tensors, key=lambda one: one[1].numel())
        at = [one for one, _ in tensors].index(name)
        with contextlib.suppress(RuntimeError):  # the server has closed the connection already
            trainer.broadcast(payloads(tensors[:at]))
            trainer.broadcast([torch.zeros(int(big.numel() * factor))])
        assert waiting().status_code == 400
        return "old"

    return fault


def _a_trainer_that_is_killed(num_broadcasts: int, buffer_bytes: int | None) -> Fault:
    def fault(stage: Stage) -> str:
        command = [sys.executable, "-m", "lockstep.tests.integration.http.vllm.weight_trainer", stage.url,
                   str(stage.step), str(num_broadcasts)]  # fmt: skip
        command += [] if buffer_bytes is None else [str(buffer_bytes)]
        program = prepared_python.Popen(command, stderr=subprocess.PIPE, text=True)
        _, said = program.communicate(timeout=PATIENCE)
        assert program.returncode == -9, said
        return "old"

    return fault


def a_trainer_that_falls_silent(stage: Stage) -> str:
    trainer = stage.starts()
    body = {"update_info": info_of(stage.newer), "timeout_s": 1.0}
    waiting = trainer.begin("/update_weights", body)
    trainer.broadcast(payloads(stage.newer[:3]))
    answer = waiting()  # the deadline's words, or gloo's own
    assert answer.status_code == 400, answer.text
    return "old"


def a_client_that_leaves_during_an_update(stage: Stage) -> str:
    trainer = stage.starts()
    _post_and_leave(stage, "/update_weights", {"update_info": info_of(stage.newer)}, stage.is_updating)
    trainer.broadcast(payloads(stage.newer))
    return "old"  # it is not finished


def a_client_that_leaves_at_finish(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer).status_code == 200
    _post_and_leave(stage, "/finish_weight_update", {"weight_version": str(stage.step)})
    return "either"


def aborts_between_the_phases(stage: Stage) -> str:
    trainer = stage.starts()
    stage.post("/abort_requests")
    assert trainer.send(stage.newer[:7]).status_code == 200
    stage.post("/pause?mode=abort")
    assert trainer.send(stage.newer[7:]).status_code == 200
    stage.post("/abort_requests")
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def an_abort_of_the_update(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer).status_code == 200
    stage.post("/abort_weight_update")
    trainer.post("/finish_weight_update", status=400)
    return "old"


def a_resume_between_the_phases(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer).status_code == 200
    stage.post("/resume", status=400)
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    return "new"


def a_shutdown_during_an_update(stage: Stage) -> str:
    trainer = stage.starts()
    stage.post("/shutdown_weight_transfer_engine", status=400)
    assert trainer.send(stage.newer).status_code == 200
    stage.post("/shutdown_weight_transfer_engine", status=400)
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    stage.post("/shutdown_weight_transfer_engine")
    stage.post("/shutdown_weight_transfer_engine")
    return "new"


def an_update_after_shutdown(stage: Stage) -> str:
    trainer = stage.trainer()
    stage.post("/shutdown_weight_transfer_engine")
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update")
    trainer.post("/update_weights", {"update_info": info_of(stage.newer)}, 400)
    return "old"


def a_finish_without_start(stage: Stage) -> str:
    stage.trainer().post("/finish_weight_update", status=400)
    return "old"


def a_finish_without_update(stage: Stage) -> str:
    stage.starts().post("/finish_weight_update", {"weight_version": "the same bytes"})
    assert stage.client.get("/weight_info").json() == {"weight_version": "the same bytes"}
    return "old"


def finish_twice(stage: Stage) -> str:
    trainer = stage.starts()
    assert trainer.send(stage.newer).status_code == 200
    trainer.post("/finish_weight_update", {"weight_version": str(stage.step)})
    trainer.post("/finish_weight_update", {"weight_version": "again"}, 400)
    return "new"


def _post_and_leave(stage: Stage, path: str, body: dict, has_begun: Callable[[], bool] = lambda: True) -> None:
    """Send a whole request, and close the connection before its answer, once it has begun."""
    request = httpx.Request("POST", f"{stage.url}{path}", json=body, headers=KEY | {"Connection": "close"})
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        wait_until(has_begun, SOON_S)


QUICK: dict[str, Fault] = {
    "init: never hosted": a_trainer_that_never_hosts_its_group,
    "start: twice": start_twice,
    "update: wrong shape": _a_wrong_update(lambda info: info | {"shapes": [*info["shapes"][:-1], [3, 3]]}),
    "update: trainer killed": _a_trainer_that_is_killed(5, None),
    "finish: without start": a_finish_without_start,
    "shutdown: during an update": a_shutdown_during_an_update,
}
ALL = QUICK | {
    "init: too small": a_group_that_is_too_small,
    "init: client leaves": a_client_that_leaves_during_init,
    "init: twice": init_twice,
    "init: another trainer's": another_trainers_init,
    "start: requests run": start_while_requests_run,
    "start: trainer ends": a_trainer_that_ends_after_start,
    "start: another caller's": another_callers_start,
    "update: trainer ends": a_trainer_that_ends_after_an_update,
    "update: another caller's": another_callers_update,
    "update: without start": an_update_without_start,
    "update: wrong name": _a_wrong_update(lambda info: info | {"names": [*info["names"][:-1], "nothing.weight"]}),
    "update: wrong dtype": _a_wrong_update(lambda info: info | {"dtype_names": ["float16"] * len(info["names"])}),
    "update: name twice": _a_wrong_update(lambda info: {key: value[:1] + value[:1] for key, value in info.items()}),
    "update: no fields": no_fields,
    "update: too short": _a_size_that_differs(0.5),
    "update: too long": _a_size_that_differs(1.5),
    "update: silence": a_trainer_that_falls_silent,
    "update: client leaves": a_client_that_leaves_during_an_update,
    "update: abort between": aborts_between_the_phases,
    "update: given up": an_abort_of_the_update,
    "update: resume": a_resume_between_the_phases,
    "update: after shutdown": an_update_after_shutdown,
    "finish: client leaves": a_client_that_leaves_at_finish,
    "finish: without update": a_finish_without_update,
    "finish: twice": finish_twice,
    **{
        f"update: killed after {what} of {'packed' if size else 'plain'}": _a_trainer_that_is_killed(num, size)
        for size in (None, PACKED)
        for what, num in {"none": 0, "one": 1, "all but one": -1, "all": 1000}.items()
    },
}
