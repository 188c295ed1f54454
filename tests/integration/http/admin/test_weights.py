"""Tests of the weight verbs over a socket: replies, sessions, versions, the checker, memory, one update at a time."""

from __future__ import annotations

import contextlib
import threading

import httpx
import pytest
import torch

from lockstep.integration.service import RolloutService
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.group.rendezvous import Rendezvous
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender

pytestmark = pytest.mark.slow  # many small calls over real sockets

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def folder(make_model, tmp_path):
    make_model("qwen2").save_pretrained(tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def trainer(make_model):
    """Make the model whose weights are sent: the engine's model, a step later."""
    model = make_model("qwen2")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.fixture
def service(folder):
    service = RolloutService(Engine(folder, EngineConfig(kv_cache="32 blocks", max_num_seqs=4)))
    yield service
    service.close()


@pytest.fixture
def slow_steps(service):
    """Make each step as long as a large model's, so that a stream still runs when calls come; set it to hurry."""
    hurry = threading.Event()

    def wait(*_: object) -> None:
        hurry.wait(0.02)

    handle = service.engine.parts.model.module.register_forward_pre_hook(wait)
    yield hurry
    hurry.set()
    handle.remove()


def _post(client: httpx.Client, path: str, **body: object) -> dict:
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    return answer.json()


def _refused(client: httpx.Client, path: str, status: int = 400, **body: object) -> dict:
    answer = client.post(f"/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["success"] is False
    return answer.json()


def _send(client: httpx.Client, model, **body: object) -> dict:
    payload = serialize_for_engine(list(model.named_parameters()), "flattened_bucket")
    body = {"load_format": "flattened_bucket"} | body
    return _post(client, "update_weights_from_tensor", serialized_named_tensors=[payload], **body)


def _generates(service: RolloutService, model) -> str:
    """Check that the engine generates as transformers does with these weights. Returns the answer's version."""
    [completion] = service.engine.generate([PROMPT], GREEDY)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    assert list(completion.token_ids) == whole[0, len(PROMPT) :].tolist()
    return completion.weight_version


# -- updates ----------------------------------------------------------------------------------------------------------


def test_an_update_that_stands_alone_is_visible_when_it_answers(client, service, trainer):
    service.engine.generate([PROMPT * 4], SamplingParams(max_new_tokens=1))
    reply = _send(client, trainer, weight_version="5")
    assert reply["message"] == "Success Weight version updated to 5."
    assert client.get("/get_weight_version").json() == {"weight_version": "5"}
    assert client.get("/model_info").json()["weight_digest"] == model_digest(trainer.named_parameters())
    assert client.get("/state").json()["num_cached_blocks"] == 0
    assert _generates(service, trainer) == "5"


def test_half_a_tensor_that_stands_alone_is_taken_back(client, service, make_model, trainer):
    tensors = [(name, tensor.detach()) for name, tensor in trainer.named_parameters()]
    sender = SharedMemorySender(bucket_bytes=4 << 10)
    buckets = sender.buckets(tensors, Manifest("5", specs_of(tensors)))
    said = _refused(client, "update_weights_from_tensor", descriptions=[next(buckets)], weight_version="5")
    assert "not wholly written" in said["message"] and "was taken back" in said["message"]
    buckets.close()
    sender.close()
    assert client.get("/state").json()["weight_update"]["state"] == "rolled_back"
    assert _generates(service, make_model("qwen2")) == "default"
    _send(client, trainer, weight_version="6")  # another update needs no more
    assert _generates(service, trainer) == "6"


def test_buckets_while_paused_become_visible_together_with_continue(client, service, trainer):
    tensors = list(trainer.named_parameters())
    _, buckets = client.post("/pause_generation", json={}), [tensors[::2], tensors[1::2]]
    for bucket in buckets:
        reply = _post(
            client, "update_weights_from_tensor", serialized_named_tensors=[serialize_for_engine(bucket)],
            flush_cache=False, weight_version="2",
        )  # fmt: skip
        assert reply["message"] == "Success Weight version stays default until the commit."
        assert client.get("/get_weight_version").json() == {"weight_version": "default"}
    client.post("/continue_generation", json={})
    assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    assert _generates(service, trainer) == "2"


def test_a_folder_is_visible_when_it_answers_also_while_paused_and_names_the_model(client, service, trainer, tmp_path):
    trainer.save_pretrained(tmp_path / "new")
    client.post("/pause_generation", json={"mode": "retract"})
    reply = _post(client, "update_weights_from_disk", model_path=str(tmp_path / "new"), weight_version="v9")
    assert reply["num_paused_requests"] == 0 and reply["message"].startswith("Succeeded to update model weights.")
    info, path = client.get("/model_info").json(), str(tmp_path / "new")
    assert (info["weight_version"], info["model_path"], info["served_model_name"]) == ("v9", path, "old")
    assert info["engine_paused"]
    client.post("/continue_generation", json={})
    assert _generates(service, trainer) == "v9"


def test_a_folder_with_keep_pause_leaves_the_engine_paused(client, trainer, tmp_path):
    trainer.save_pretrained(tmp_path / "new")
    _post(client, "update_weights_from_disk", model_path=str(tmp_path / "new"), keep_pause=True)
    assert client.get("/state").json()["paused"]


def test_a_folder_that_is_not_there_changes_nothing(client, service, folder):
    before = service.model_digest()
    said = _refused(client, "update_weights_from_disk", model_path=str(folder / "nowhere"), weight_version="2")
    assert "nowhere" in said["message"]
    info = client.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("default", str(folder))
    assert service.model_digest() == before and not info["engine_paused"]


def test_digests_of_the_sender_are_compared_and_a_difference_leaves_no_trace(client, service, trainer):
    before = service.model_digest()
    roots = {name: root.hex() for name, root in tensor_roots(trainer.named_parameters()).items()}
    payload = [serialize_for_engine(list(trainer.named_parameters()))]
    wrong = roots | {"model.norm.weight": "00" * 32}
    said = _refused(client, "update_weights_from_tensor", serialized_named_tensors=payload, verify=wrong)
    assert "model.norm.weight" in said["message"] and said["error"]["type"] == "DigestMismatch"
    assert service.model_digest() == before
    payload = [serialize_for_engine(list(trainer.named_parameters()))]
    reply = _post(client, "update_weights_from_tensor", serialized_named_tensors=payload, verify=roots)
    assert reply["report"]["verified"] and _generates(service, trainer) == "default"


def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(client, service):
    before = service.model_digest()
    payload = serialize_for_engine([("model.norm.weight", torch.ones(3)), ("no.such.weight", torch.ones(2))])
    said = _refused(client, "update_weights_from_tensor", serialized_named_tensors=[payload])
    assert "model.norm.weight" in said["message"] and "no.such.weight" in said["message"]
    assert service.model_digest() == before and client.get("/state").json()["weight_update"]["state"] == "idle"


def test_an_update_under_a_running_request_names_its_remedies(client, service, trainer, slow_steps):
    stream = service.engine.stream(PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    payload = [serialize_for_engine(list(trainer.named_parameters()))]
    said = _refused(client, "update_weights_from_tensor", serialized_named_tensors=payload)
    assert "abort_all_requests" in said["message"] and "retract" in said["message"]
    _send(client, trainer, abort_all_requests=True, weight_version="2")
    slow_steps.set()
    assert [c.completion.finish_reason.type for c in stream if c.completion] == ["abort"]
    assert _generates(service, trainer) == "2"


def test_a_request_paused_in_place_goes_on_with_the_new_weights(client, service, trainer, slow_steps):
    stream = service.engine.stream(PROMPT, SamplingParams(max_new_tokens=150, ignore_eos=True))
    next(stream)
    client.post("/pause_generation", json={"mode": "in_place"})
    slow_steps.set()
    payload = serialize_for_engine(list(trainer.named_parameters()))
    body = {"serialized_named_tensors": [payload], "flush_cache": True, "weight_version": "2"}
    said = _refused(client, "update_weights_from_tensor", **body)
    assert said["param"] == "flush_cache" and "1 requests hold KV" in said["message"]
    _post(client, "update_weights_from_tensor", **body | {"flush_cache": False})
    client.post("/continue_generation", json={})
    [completion] = [c.completion for c in stream if c.completion]
    assert completion.finish_reason.type == "length"
    assert [span.version for span in completion.weight_versions] == ["default", "2"]


def test_two_updates_at_once_and_the_second_learns_the_age_of_the_first(
    server, client, service, trainer, tmp_path, until
):
    trainer.save_pretrained(tmp_path / "new")
    engaged, release = threading.Event(), threading.Event()
    holder = threading.Thread(
        target=service.engine.between_steps, args=("hold", lambda: (engaged.set(), release.wait(10)))
    )
    holder.start()
    engaged.wait()
    answers = []
    first = threading.Thread(
        target=lambda: answers.append(_post(client, "update_weights_from_disk", model_path=str(tmp_path / "new")))
    )
    first.start()  # it waits for the engine
    until(lambda: server.app.state.updates.age_s is not None)
    said = _refused(client, "begin_weight_update", 409)
    assert said["in_progress"] == "update_weights_from_disk" and 0 <= said["age_s"] < 10
    assert client.get("/health").status_code == 200
    release.set()
    holder.join()
    first.join(10)
    assert answers
    assert _generates(service, trainer) == "default"
    _post(client, "begin_weight_update")
    _post(client, "abort_weight_update")


RIGHT = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
REFUSED_OVER_A_GROUP = {  # path, status, body
    "no names": ("update_weights_from_distributed", 400, {"dtypes": [], "shapes": []}),
    "a wrong size": ("update_weights_from_distributed", 400, RIGHT | {"shapes": [[-1]]}),
    "a wrong selector": ("update_weights_from_distributed", 400, RIGHT | {"selector": "some"}),
    "it is too late": ("update_weights_from_distributed", 408, RIGHT | {"timeout_s": 1e-9}),
    "another update": ("update_weights_from_distributed", 409, RIGHT),
    "another update, by our own path": ("lockstep/update_weights_from_distributed", 409, RIGHT),
    "an unknown tensor": ("update_weights_from_distributed", 400, RIGHT),
    "no tensors were told": ("areal_update_weights_xccl", 400, {}),
    "tensors are told wrongly": ("areal_set_update_weight_meta", 400, RIGHT | {"shapes": [[-1]]}),
}


def join_alone(service, name, secret=None):
    """Join a group that nobody else is in."""
    service.groups.init(Rendezvous("127.0.0.1", free_port(), 0, 1, name, "gloo", 20.0, None, secret=secret))


@pytest.mark.parametrize("reason", REFUSED_OVER_A_GROUP)
def test_a_refused_update_over_a_group_breaks_it_for_broadcasts_are_under_way(server, client, reason):
    path, status, body = REFUSED_OVER_A_GROUP[reason]
    for name in ("mine", "others"):
        join_alone(server.app.state.service, name)
    body = body | ({"group_name": "mine"} if body else {})
    with server.app.state.updates.enter("another update") if status == 409 else contextlib.nullcontext():
        refused = _refused(client, path, status, **body)
    assert "mine" in refused["message"] and refused["message"].endswith("destroy the group and join a new one")
    assert refused["error"]["message"] == refused["message"]
    groups = client.get("/state").json()["weight_groups"]
    assert "before its broadcasts were received" in groups["mine"]
    assert groups["others"] == ("ready" if body else groups["mine"])  # with no body it is not known which one is meant
    again = _refused(client, "update_weights_from_distributed", **RIGHT, group_name="mine")
    assert "not used" in again["message"] and again["message"].count("join a new one") == 1


def test_a_body_that_cannot_be_read_breaks_the_groups_of_other_frameworks_alone(client, service):
    for name, secret in (("theirs", None), ("ours", "s" * 64)):
        join_alone(service, name, secret)
    assert client.post("/update_weights_from_distributed", content=b"{").status_code == 400
    groups = client.get("/state").json()["weight_groups"]
    assert groups["ours"] == "ready" != groups["theirs"]
    _refused(client, "update_weights_from_distributed", load_format="lockstep", group_name="ours", shapes=[[-1]])
    assert client.get("/state").json()["weight_groups"]["ours"] == "ready"  # our sender agrees with the engine first


WRONG_FIELDS = [
    ("update_weights_from_tensor", {}, "serialized_named_tensors"),
    ("update_weights_from_tensor", {"serialized_named_tensors": "abc"}, "serialized_named_tensors"),
    ("update_weights_from_tensor", {"serialized_named_tensors": [], "selector": "some"}, "selector"),
    ("update_weights_from_distributed", {"dtypes": [], "shapes": []}, "names"),
    ("update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[-1]]}, "shapes.0.0"),
    ("update_weights_from_disk", {}, "model_path"),
    ("update_weights_from_disk", {"model_path": "x", "is_async": True}, "is_async"),
    ("update_weights_from_disk", {"model_path": "x", "load_format": "gguf"}, "load_format"),
    ("init_weights_update_group", {"master_address": "a"}, "master_port"),
    ("init_weights_update_group", {"master_address": "a", "master_port": 70000, "rank_offset": 1, "world_size": 2},
     "master_port"),
    ("destroy_weights_update_group", {"group_name": "nobody"}, "group_name"),
    ("update_weight_version", {}, "new_version"),
    ("pull_weights", {"local_checkpoint_dir": "a", "source_dir": "b", "target_version": "x"}, "target_version"),
    ("release_memory_occupation", {"tags": "weights"}, "tags"),
]  # fmt: skip
REFUSALS = [
    ("update_weights_from_tensor", {"serialized_named_tensors": ["!!!"]}, "base64"),
    ("update_weights_from_tensor", {"serialized_named_tensors": ["a", "b"]}, "this engine has 1"),
    ("update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}, "group"),
    ("destroy_weights_update_group", {}, "The group to be destroyed does not exist."),
    ("begin_weight_update", {"coverage": "half"}, "half"),
    ("begin_weight_update", {"digest": "never"}, "never"),
    ("end_weight_update", {}, "no weight-update session is open; call begin_weight_update() first"),
    ("verify_weight_update", {"digests": {}}, "no weight-update session is open"),
    ("revert_weight_update", {}, "no commit to revert"),
    ("release_memory_occupation", {"tags": ["weights", "everything"]}, "everything"),
    ("weights_checker", {"action": "explode"}, "Unsupported action='explode'"),
    ("get_weights_by_name", {"name": "nobody"}, "nobody"),
]


def test_a_wrong_field_is_a_400_that_names_it(client):
    for path, body, field in WRONG_FIELDS:
        assert (path, _refused(client, path, **body)["param"]) == (path, field)


def test_what_the_service_refuses_is_a_400_in_its_words(client):
    for path, body, says in REFUSALS:
        said = _refused(client, path, **body)
        assert says in said["message"] and said["error"]["message"] == said["message"]


def test_there_is_no_draft_model_to_act_on(client):
    for path in ("begin_weight_update", "update_weights_from_tensor", "weights_checker"):
        reply = _post(client, path, selector="draft", serialized_named_tensors=["x"])
        assert reply["skipped"] and "draft" in reply["message"]
    assert client.get("/state").json()["weight_update"]["state"] == "idle"


# -- sessions and versions --------------------------------------------------------------------------------------------


def test_a_session_holds_generation_until_it_ends_and_is_strict_about_its_order(client, service, trainer):
    _post(client, "begin_weight_update", selector="target")
    said = _refused(client, "begin_weight_update")
    assert said["message"] == "a weight-update session is already open; call end_weight_update() first"
    assert "session is open" in _refused(client, "continue_generation")["message"]
    _send(client, trainer, weight_version="3")
    assert client.get("/get_weight_version").json() == {"weight_version": "default"}
    _post(client, "update_weight_version", new_version="4", abort_all_requests=False)
    reply = _post(client, "end_weight_update")
    assert (reply["weight_version"], reply["weight_digest"]) == ("4", model_digest(trainer.named_parameters()))
    assert _generates(service, trainer) == "4"
    assert _post(client, "revert_weight_update")["weight_version"] == "default"
    assert client.get("/get_weight_version").json() == {"weight_version": "default"}


def test_a_session_of_full_coverage_lists_what_it_misses_and_stays_open(client, trainer):
    _post(client, "begin_weight_update", coverage="full")
    payload = serialize_for_engine([("model.norm.weight", trainer.model.norm.weight)])
    _post(client, "update_weights_from_tensor", serialized_named_tensors=[payload], flush_cache=False)
    assert "model.embed_tokens.weight" in _refused(client, "end_weight_update")["message"]
    rest = [(name, tensor) for name, tensor in trainer.named_parameters() if name != "model.norm.weight"]
    payload = [serialize_for_engine(rest)]
    _post(client, "update_weights_from_tensor", serialized_named_tensors=payload, flush_cache=False)
    _post(client, "end_weight_update")


def test_a_bucket_that_is_sent_again_is_taken_again(client, service, trainer):
    client.post("/pause_generation", json={})
    for version in ("2", "2", "3"):
        _send(client, trainer, weight_version=version)
    client.post("/continue_generation", json={})
    assert _generates(service, trainer) == "3"


def test_a_session_that_is_given_up_leaves_no_trace(client, service, trainer):
    before = service.model_digest()
    _post(client, "begin_weight_update")
    _send(client, trainer, weight_version="3")
    _post(client, "abort_weight_update", why="the trainer changed its mind")
    assert service.model_digest() == before
    assert "changed its mind" in client.get("/state").json()["weight_update"]["why"]


def test_a_version_can_be_renamed(client, service):
    assert _post(client, "update_weight_version", new_version=12)["new_version"] == "12"  # a number, leniently
    assert client.get("/model_info").json()["weight_version"] == "12"


# -- values, checker, memory ------------------------------------------------------------------------------------------


def test_values_of_a_parameter_are_nested_lists_and_what_is_no_number_is_text(client, service):
    weight = service.engine.model.module.model.norm.weight
    with torch.no_grad():
        weight[0], weight[1] = float("inf"), float("nan")
    values = client.post("/get_weights_by_name", json={"name": "model.norm.weight", "truncate_size": 4}).json()
    assert values[:2] == ["Infinity", "NaN"] and values[2:] == weight[2:4].tolist()
    query = {"name": "lm_head.weight", "truncate_size": "3"}  # tied
    table = service.engine.model.module.model.embed_tokens.weight
    assert client.get("/get_weights_by_name", params=query).json() == table[:3, :3].tolist()
    assert client.request("GET", "/get_weights_by_name", json=query).json() == table[:3, :3].tolist()
    for given, told in (
        ({"params": query | {"truncate_size": 0}}, "truncate_size: Input should be greater than or equal to 1"),
        ({"params": query | {"truncate_size": "x"}}, "truncate_size: Input should be a valid integer"),
        ({"json": {"truncate_size": 3}}, "name: Field required"),
    ):
        refused = client.request("GET", "/get_weights_by_name", **given)
        message = refused.json()["message"]
        assert refused.status_code == 400 and message.startswith(told) and "\n" not in message


def test_the_checker_answers_in_sglangs_shape_with_our_digests_beside(client, service):
    reply = client.get("/weights_checker").json()
    assert reply == _post(client, "weights_checker", action="checksum") | {"seconds": reply["seconds"]}
    [rank] = reply["ranks"]
    assert rank.keys() == {"checksums", "per_gpu_checksum", "parallelism_info"}
    [role] = rank["parallelism_info"]
    assert role == {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0,
                    "pp_size": 1, "rank": 0, "size": 1}  # fmt: skip
    assert all(len(value) == 16 for value in rank["checksums"].values())
    assert len(reply["per_engine_checksum"]) == 64 and reply["model_digest"] == service.model_digest()
    short = _post(client, "weights_checker", skip_tensor_list=["mlp"])
    assert not any("mlp" in name for name in short["ranks"][0]["checksums"])


def test_snapshot_reset_update_compare_proves_that_an_update_landed(client, service, folder):
    reply = _post(client, "weights_checker", action="snapshot")
    assert "ranks" not in reply
    _post(client, "weights_checker", action="reset_tensors")
    answer = _refused(client, "weights_checker", action="compare")
    assert answer["message"].startswith("check tensor equality failed:")
    assert "model.norm.weight: max_abs_err=" in answer["message"]
    _post(client, "update_weights_from_disk", model_path=str(folder))
    _post(client, "weights_checker", action="compare", allow_quant_error=False)
    assert "no snapshot" in _refused(client, "weights_checker", action="compare")["message"]


def test_differences_that_are_infinite_are_json(client, service):
    _post(client, "weights_checker", action="snapshot")
    with torch.no_grad():
        service.engine.model.module.model.norm.weight[0] = float("nan")
    [changed] = _refused(client, "weights_checker", action="compare")["changed"]
    assert (changed["name"], changed["max_abs_err"]) == ("model.norm.weight", "Infinity")


def test_get_of_the_checker_does_checksum_only(client, service):
    before = service.model_digest()
    answer = client.request("GET", "/weights_checker", json={"action": "reset_tensors"})
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert service.model_digest() == before


def test_memory_is_released_and_resumed_by_tags_as_often_as_asked(client, service, trainer):
    for tags in ({}, {"tags": None}, {"tags": ["kv_cache", "weights", "cuda_graph"]}):
        answer = client.post("/release_memory_occupation", json=tags)
        assert (answer.status_code, answer.json()) == (200, None)
    state = client.get("/state").json()
    assert (state["kv_bytes"], state["weight_bytes"]) == (0, 0)
    assert client.get("/flush_cache").status_code == 200  # with the KV released
    assert "released" in _refused(client, "update_weights_from_tensor", serialized_named_tensors=["x"])["message"]
    for _ in range(2):
        assert client.post("/resume_memory_occupation", json={"tags": ["weights"]}).json() is None
    _send(client, trainer, weight_version="2", flush_cache=False)
    assert client.get("/get_weight_version").json() == {"weight_version": "default"}  # more buckets may follow
    assert client.post("/resume_memory_occupation", json={"tags": ["kv_cache", "cuda_graph"]}).json() is None
    assert client.post("/resume_memory_occupation", json={}).json() is None
    assert client.get("/get_weight_version").json() == {"weight_version": "2"}
    assert _generates(service, trainer) == "2"


def test_memory_in_use_is_not_released(client, service, slow_steps):
    stream = service.engine.stream(PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    client.post("/pause_generation", json={"mode": "in_place"})
    slow_steps.set()
    assert "1 running" in _refused(client, "release_memory_occupation")["message"]
    assert client.get("/state").json()["kv_bytes"] > 0
    client.post("/continue_generation", json={})
    assert [c.completion.finish_reason.type for c in stream if c.completion] == ["length"]


def test_what_changes_state_is_never_get(client):
    for path in ("release_memory_occupation", "resume_memory_occupation", "begin_weight_update", "end_weight_update",
                 "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
                 "update_weight_version", "init_weights_update_group", "pull_weights", "finish_digest"):  # fmt: skip
        assert (path, client.get(f"/{path}").status_code) == (path, 405)


def test_quantisation_hooks_are_accepted_and_do_nothing(client, service):
    before = service.model_digest()
    _post(client, "post_process_weights", restore_weights_before_load=True, post_process_quantization=True)
    assert service.model_digest() == before


# -- groups -----------------------------------------------------------------------------------------------------------


def test_a_rendezvous_nobody_comes_to_fails_at_its_deadline_and_holds_nothing_up(client, service, until):
    group = {"master_address": "127.0.0.1", "master_port": str(free_port()), "rank_offset": 1, "world_size": 2,
             "group_name": "slime-pp_0", "backend": "gloo"}  # fmt: skip
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(client.post("/init_weights_update_group", json=group | {"timeout_s": 1.5}))
    )
    thread.start()
    until(lambda: client.get("/state").json()["weight_groups"] == {"slime-pp_0": "joining"})
    [completion] = service.engine.generate([PROMPT], GREEDY)
    assert len(completion.token_ids) == 12 and client.get("/health").status_code == 200
    thread.join(20)
    assert answers[0].status_code == 400 and "had not arrived: 0" in answers[0].json()["message"]
    assert client.get("/state").json()["weight_groups"] == {}


def test_a_rendezvous_is_ended_by_destroy(client, service, until):
    group = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(client.post("/init_weights_update_group", json=group | {"backend": "gloo"}))
    )
    thread.start()
    until(lambda: service.groups.state())
    _post(client, "destroy_weights_update_group")
    thread.join(10)
    assert answers[0].status_code == 400
