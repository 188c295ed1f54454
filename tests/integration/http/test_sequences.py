"""Tests with the call sequences of slime, Miles and verl, sent to `lockstep serve` by a small trainer with real groups.

Engines are processes of their own. After every update their output is compared with transformers. The order of calls is
that of the frameworks (August 2026); each test's docstring names the framework's section.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import httpx
import pytest
import torch
import torch.distributed as dist
import transformers

from lockstep.tests.support import prepared_python
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.framework_sender import serialize_for_engine

pytestmark = pytest.mark.slow

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
NUM_TOKENS = 12
LONGEST = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3000, "temperature": 0.0, "ignore_eos": True}}
LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}}
_CONFIG = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": None,
           "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": True}  # fmt: skip

Named = tuple[str, torch.Tensor]


class Trainer:
    """A trainer, rank 0 of the groups: a model that changes, and its weights in buckets."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**_CONFIG)).eval()
        self._generator = torch.Generator().manual_seed(2)
        self.step()  # random weights whose logits are far from uniform

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.08)

    def buckets(self, num: int = 3) -> list[list[Named]]:
        tensors = [(name, p.detach()) for name, p in self.model.named_parameters()]
        return [tensors[i::num] for i in range(num)]

    def expected(self, prompt: Sequence[int] = PROMPT) -> tuple[list[int], list[float]]:
        """Return transformers' greedy tokens and their log-probabilities."""
        whole = self.model.generate(torch.tensor([list(prompt)]), max_new_tokens=NUM_TOKENS, do_sample=False)[0]
        logprobs = self.model(whole[None]).logits.log_softmax(-1)[0]
        ids = whole[len(prompt) :].tolist()
        return ids, [logprobs[len(prompt) - 1 + i, id].item() for i, id in enumerate(ids)]


class Worker:
    """An engine, called as the frameworks' clients do: a status of 400 or more raises."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process, self.url = process, url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: object = None) -> object:
        answer = self.client.post(path, json={} if body is None else body)
        assert answer.status_code < 400, f"{path}: {answer.text}"
        if not answer.content:
            return None
        said = answer.json()
        assert not (isinstance(said, dict) and said.get("success") is False)  # Miles checks that, too
        return said

    def flush(self, method: str = "GET") -> None:
        answer = self.client.request(method, "/flush_cache")
        assert answer.status_code == 200, answer.text

    def version(self) -> str:
        return self.client.get("/get_weight_version").json()["weight_version"]

    def check(self, trainer: Trainer, version: str) -> None:
        """Check that the engine generates as transformers with the trainer's weights, and reports their version."""
        params = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
        ids, logprobs = trainer.expected()
        meta = answer["meta_info"]
        assert answer["output_ids"] == ids
        assert [triple[1] for triple in meta["output_token_logprobs"]] == ids
        assert [triple[0] for triple in meta["output_token_logprobs"]] == pytest.approx(logprobs, abs=1e-4)
        assert meta["weight_version"] == version == self.version()

    def drain(self, until: Callable[..., None]) -> None:
        """Abort all requests and wait until the loads are zero, as slime's early stop does."""
        self.post("/abort_request", {"abort_all": True})
        until(lambda: all(
            load["num_running_reqs"] + load["num_waiting_reqs"] == 0
            for load in self.client.get("/v1/loads?include=core").json()["loads"]
        ))  # fmt: skip


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    torch.set_num_threads(1)
    return Trainer()


@pytest.fixture(scope="module")
def workers(trainer, tmp_path_factory) -> Iterator[list[Worker]]:
    """Start two engines on the trainer's first weights."""
    folder = tmp_path_factory.mktemp("model")
    trainer.model.save_pretrained(folder)
    command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(folder), "--port", "0"]
    command += ["--engine", "kv_cache=512 blocks", "max_num_seqs=8"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [prepared_python.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        yield [Worker(process, _url_of(process)) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=30)


@pytest.fixture(autouse=True)
def watched(workers) -> Iterator[None]:
    """Check every engine's health all the time, as slime's monitor does, which kills an engine after one bad answer."""
    bad, stop = [], threading.Event()

    def watch() -> None:
        with httpx.Client(timeout=30) as client:
            while not stop.wait(0.05):
                bad.extend(w.url for w in workers if client.get(f"{w.url}/health_generate").status_code != 200)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    stop.set()
    thread.join()
    assert not bad
    for worker in workers:
        state = worker.client.get("/state").json()
        assert state["num_running"] == state["num_waiting"] == state["num_held_blocks"] == 0
        usage = state["num_free_blocks"] + state["num_cached_blocks"] + state["num_pinned_blocks"]
        assert usage == state["num_blocks"] and not state["paused"]


class Group:
    """A group of the trainer with every worker, joined as the frameworks do."""

    def __init__(self, workers: list[Worker], name: str) -> None:
        self._workers, self.name = workers, name
        self._pool = ThreadPoolExecutor(len(workers))
        port = free_port()
        body = {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + len(workers),
                "group_name": name, "backend": "gloo"}  # fmt: skip
        waiting = self.call_all("/init_weights_update_group", lambda i: body | {"rank_offset": 1 + i})
        self._group = _foreign_group(port, len(workers) + 1, name)
        _results(waiting)

    def call_all(self, path: str, body: Callable[[int], object]) -> list[Future]:
        return [self._pool.submit(worker.post, path, body(i)) for i, worker in enumerate(self._workers)]

    def send(self, bucket: list[Named], **body: object) -> None:
        """Send one bucket: post the calls, broadcast the tensors, then wait for the replies."""
        plan = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self.name,
            "flush_cache": False,
        }
        waiting = self.call_all("/update_weights_from_distributed", lambda i: plan | body)
        if body.get("load_format") == "flattened_bucket":
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
            dist.broadcast(flat, group=self._group, group_src=0)
        else:
            works = [dist.broadcast(t.contiguous(), group=self._group, group_src=0, async_op=True) for _, t in bucket]
            for work in works:
                work.wait()
        _results(waiting)

    def destroy(self) -> None:
        _results(self.call_all("/destroy_weights_update_group", lambda i: {"group_name": self.name}))
        dist.destroy_process_group(self._group)
        self._pool.shutdown()


# -- slime ------------------------------------------------------------------------------------------------------------


def test_slime_start_up_proves_that_the_first_sync_lands(workers, trainer):
    """Section 5.1, with --check-weight-update-equal."""
    worker = workers[0]
    worker.post("/weights_checker", {"action": "snapshot"})
    worker.post("/weights_checker", {"action": "reset_tensors"})
    refused = worker.client.post("/weights_checker", json={"action": "compare"})
    assert refused.status_code == 400 and "check tensor equality failed:" in refused.json()["message"]
    _slime_colocated_step(worker, trainer, "1")
    worker.post("/weights_checker", {"action": "compare"})
    worker.check(trainer, "1")


def test_slime_colocated(workers, trainer):
    """Section 5.3, offload on: all calls between resume of the weights and of the KV run while the KV is released."""
    worker = workers[0]
    for version in ("2", "3"):
        worker.flush()
        assert worker.post("/release_memory_occupation") is None
        trainer.step()
        assert worker.post("/resume_memory_occupation", {"tags": ["weights"]}) is None
        _slime_colocated_step(worker, trainer, version)
        assert worker.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}) is None
        worker.check(trainer, version)


def _slime_colocated_step(worker: Worker, trainer: Trainer, version: str) -> None:
    worker.post("/pause_generation", {})
    worker.flush()
    worker.post("/post_process_weights", {"restore_weights_before_load": True, "post_process_quantization": False})
    for bucket in trainer.buckets():
        payload = serialize_for_engine(bucket, "flattened_bucket")
        body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
        said = worker.post("/update_weights_from_tensor", body | {"weight_version": version})
        assert said["message"].startswith("Success")
    worker.post("/post_process_weights", {"restore_weights_before_load": False, "post_process_quantization": True})
    worker.post("/continue_generation", {})


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_slime_disaggregated(workers, trainer, load_format, until):
    """Sections 5.0 and 5.3: two engines in a group, two groups at once, requests that run at the pause, a reconnect."""
    groups = [Group(workers, f"slime-pp_{stage}") for stage in range(2)]
    for version in ("11", "12", "13"):
        trainer.step()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(worker.post, "/generate", LONG) for worker in workers for _ in range(2)]
            until(lambda: all(w.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"] for w in workers))
            for worker in workers:
                worker.post("/pause_generation", {})
                worker.flush()
            for answer in _results(asked):
                assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        for index, bucket in enumerate(trainer.buckets()):
            groups[index % 2].send(bucket, weight_version=version, load_format=load_format)
        for worker in workers:
            worker.post("/continue_generation", {})
            worker.check(trainer, version)
        if version == "12":  # an engine was replaced: every group is made anew, under its old name
            groups[1].destroy()
            groups[1] = Group(workers, "slime-pp_1")
    for group in groups:
        group.destroy()
    unknown = workers[0].client.post("/destroy_weights_update_group", json={"group_name": "slime-pp_0"})
    assert unknown.status_code == 400 and "does not exist" in unknown.json()["message"]


def test_slime_early_stop_and_disk(workers, trainer, tmp_path, until):
    """Sections 5.2 and 5.3: abort until the loads are zero, then a folder; the version is read before continue."""
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(workers[0].post, "/generate", LONG) for _ in range(4)]
        until(lambda: workers[0].client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
        workers[0].drain(until)
        assert {a["meta_info"]["finish_reason"]["type"] for a in _results(asked)} <= {"abort", "length"}
    trainer.step()
    trainer.model.save_pretrained(tmp_path / "weight_v000021")
    for worker in workers:
        worker.post("/pause_generation", {})
        worker.flush()
        body = {"model_path": str(tmp_path / "weight_v000021"), "weight_version": "21"}
        assert worker.post("/update_weights_from_disk", body)["success"]
        assert worker.version() == "21"
        worker.post("/continue_generation", {})
        worker.check(trainer, "21")


# -- Miles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_miles_disaggregated(workers, trainer, mode, until):
    """Section 5.4: a session around the buckets, and requests that continue afterwards unless they are aborted."""
    group = Group(workers, "miles-pp_0")
    before = workers[0].version()
    trainer.step()
    with ThreadPoolExecutor(2) as pool:
        asked = []
        for worker in workers:  # one after the other: each is paused as soon as it runs
            asked.append(pool.submit(worker.post, "/generate", LONGEST))
            until(lambda worker=worker: worker.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
            worker.post("/pause_generation", {"mode": mode})
            if mode != "in_place":
                worker.flush()
        for worker in workers:
            worker.post("/begin_weight_update", {"selector": "all"})
        for bucket in trainer.buckets():
            group.send(bucket, selector="all", weight_version=f"3{mode}")
        assert workers[0].version() == before  # no client sees a partial update
        for worker in workers:
            worker.post("/update_weight_version", {"new_version": f"3{mode}", "abort_all_requests": False})
            worker.post("/end_weight_update", {})
            worker.post("/continue_generation", {})
        answers = _results(asked)
    for worker, answer in zip(workers, answers, strict=True):
        spans = [span["version"] for span in answer["meta_info"]["weight_versions"]]
        if mode == "abort":
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert len(answer["output_ids"]) == 3000 and spans[-1] == f"3{mode}"
        worker.check(trainer, f"3{mode}")
    audit = workers[0].post("/weights_checker", {"action": "checksum", "allow_quant_error": False, "selector": "all"})
    other = workers[1].post("/weights_checker", {"action": "checksum"})
    assert audit["ranks"] and isinstance(audit["ranks"][0]["parallelism_info"], list)
    assert audit["per_engine_checksum"] == other["per_engine_checksum"]
    group.destroy()


def test_miles_colocated(workers, trainer):
    """Section 5.4, Megatron: flush, release everything, resume the weights, a session, continue, resume the KV."""
    worker = workers[1]
    for version in ("41", "42"):
        worker.flush()
        worker.post("/release_memory_occupation", {"tags": ["cuda_graph", "kv_cache", "weights"]})
        trainer.step()
        worker.post("/resume_memory_occupation", {"tags": ["weights"]})
        worker.post("/pause_generation", {"mode": "retract"})
        worker.flush()
        worker.post("/begin_weight_update", {"selector": "all"})
        for bucket in trainer.buckets():
            payload = serialize_for_engine(bucket, "flattened_bucket")
            body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
            worker.post("/update_weights_from_tensor", body | {"selector": "all", "weight_version": version})
        worker.post("/end_weight_update", {})
        worker.post("/continue_generation", {})
        worker.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        worker.check(trainer, version)


def test_miles_fsdp(workers, trainer, until):
    """Section 5.4, FSDP: pause and flush at the same time, and a flush after every bucket inside the session."""
    worker = workers[1]
    trainer.step()
    with ThreadPoolExecutor(3) as pool:
        asked = pool.submit(worker.post, "/generate", LONG)
        until(lambda: worker.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"])
        paused = pool.submit(worker.post, "/pause_generation", {"mode": "retract"})
        until(lambda: worker.client.get("/flush_cache").status_code == 200)  # it retries up to a minute
        paused.result()
        worker.post("/begin_weight_update", {})
        for bucket in trainer.buckets():
            payload = serialize_for_engine(bucket, "flattened_bucket")
            body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "flush_cache": False}
            worker.post("/update_weights_from_tensor", body | {"weight_version": "51"})
            worker.flush()
        worker.post("/end_weight_update", {})
        worker.post("/continue_generation", {})
        assert len(asked.result()["output_ids"]) == 400
    worker.flush("POST")  # before prefill rescoring
    worker.check(trainer, "51")


# -- verl -------------------------------------------------------------------------------------------------------------


def test_verl_every_call_twice(workers, trainer):
    """Section 5.5, the HTTP part: no pause, no session, flush_cache left at its default, and retries of every call."""
    worker = workers[0]
    for version in ("61", "62"):
        for _ in range(2):
            assert worker.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}) is None
        trainer.step()
        for _ in range(2):
            assert worker.post("/resume_memory_occupation", {"tags": ["weights"]}) is None
        for bucket in trainer.buckets():
            for _ in range(2):
                body = {"serialized_named_tensors": [serialize_for_engine(bucket)], "load_format": None}
                worker.post("/update_weights_from_tensor", body | {"weight_version": version})
        worker.flush()
        for _ in range(2):
            assert worker.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
        worker.check(trainer, version)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _results(futures: list[Future]) -> list:
    return [future.result(60) for future in futures]


def _url_of(process: subprocess.Popen) -> str:
    lines = []
    for line in process.stderr:
        lines.append(line)
        if " at http" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe would fill
            return line.split()[-1]
    raise AssertionError("".join(lines))


def _foreign_group(port: int, world_size: int, name: str) -> dist.ProcessGroup:
    """Join a group as the trainer: the steps of SGLang's init_custom_process_group, with its private names."""
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=30)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), dist.PrefixStore(name, store), group_name=name, backend_options=None,
        timeout=timeout,
    )  # fmt: skip
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
