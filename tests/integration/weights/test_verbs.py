"""The weight verbs of a service, as the frameworks and our own senders call them."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.integration.bench.parts.ports import HOST
from lockstep.integration.push.adapters.trainer_tensors import trainer_tensors
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import MemoryReleased, NotIdle, SamplingRefused
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.tests.support.forked_ranks import free_port
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.tests.support.random_models import with_router_biases
from lockstep.weight_sync.delta.encode import encode_delta
from lockstep.weight_sync.delta.stream import save_delta
from lockstep.weight_sync.digests.model_digest import model_digest, tensor_roots
from lockstep.weight_sync.disk.folder import save_folder
from lockstep.weight_sync.errors import DigestMismatch, SessionError, TransferFailed
from lockstep.weight_sync.manifest import Manifest, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender

PATIENCE = 20.0  # seconds; far more than any wait here takes
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
CONFIG = EngineConfig(kv_cache="16 blocks", max_num_seqs=4)
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
Named = list[tuple[str, Tensor]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def service(model, folder) -> Iterator[RolloutService]:
    service = RolloutService(Engine(copy.deepcopy(model), CONFIG), ServiceConfig(shared_memory_folder=folder))
    yield service
    service.close()


@pytest.fixture
def owned(model, folder) -> Iterator[RolloutService]:
    """Make a service whose engine loaded its weights itself and therefore owns their memory."""
    model.save_pretrained(folder / "model")
    service = RolloutService(Engine(folder / "model", CONFIG))
    yield service
    service.close()


@pytest.fixture
def newer(model) -> nn.Module:
    """Make the trainer's model some steps later: a twentieth of its elements have changed."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_((torch.rand(parameter.shape, generator=generator) < 0.05) * 0.5)
    return other


def named(model: nn.Module) -> Named:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def digest_of(model: nn.Module) -> str:
    return model_digest(named(model))


def roots(model: nn.Module) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(named(model)).items()}


def standing(service: RolloutService) -> tuple[object, ...]:
    engine = service.engine
    return engine.weight_version, engine.weight_digest, engine.epoch, service.model_digest()


def greedy(model: nn.Module) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(PROMPT) :])


def answer(service: RolloutService) -> tuple[int, ...]:
    return tuple(service.engine.generate([PROMPT], PARAMS)[0].token_ids)


def specs_as_lists(tensors: Named) -> dict[str, list]:
    return {
        "names": [name for name, _ in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }


# -- the frameworks' payloads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", [None, "direct", "flattened_bucket"])
def test_the_frameworks_payload_lands(service, newer, load_format):
    pairs = named(newer)
    for part in (pairs[:9], pairs[9:]):
        payload = serialize_for_engine(part, load_format)
        record = service.update_weights_from_tensor([payload], load_format=load_format, weight_version="5")
        assert record.num_tensors == len(part)
    service.continue_generation()
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))


def test_payloads_that_nobody_should_load_are_refused(model, newer):
    import pickle

    service = RolloutService(Engine(model, CONFIG), ServiceConfig(allow_pickle=False))
    with pytest.raises(ValueError, match="allow_pickle"):
        service.update_weights_from_tensor([serialize_for_engine(named(newer))])
    service.config = ServiceConfig(max_pickle_bytes=100)
    with pytest.raises(ValueError, match="bytes"):
        service.update_weights_from_tensor([serialize_for_engine(named(newer))])
    service.config = ServiceConfig()
    with pytest.raises(ValueError, match="system"):
        service.update_weights_from_tensor([__import__("base64").b64encode(pickle.dumps(os.system)).decode()])
    for wrong in ([], ["a", "b"]):
        with pytest.raises(ValueError, match="this engine has 1"):
            service.update_weights_from_tensor(wrong)
    with pytest.raises(ValueError, match="either"):
        service.update_weights_from_tensor()
    assert service.state()["weight_update"]["state"] == "idle"


# -- the frameworks' groups --------------------------------------------------------------------------------------------


def send_as_a_framework_does(port: int, broadcasts: list[Tensor]) -> None:
    """Send as a trainer's rank 0: the steps of SGLang's init_custom_process_group, private names included."""
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=PATIENCE)
    store, rank, world_size = next(rendezvous(f"tcp://{HOST}:{port}", 0, 2, timeout=timeout))
    store.set_timeout(timeout)
    store = dist.PrefixStore("slime", store)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), store, group_name="slime", timeout=timeout
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for tensor in broadcasts:
        dist.broadcast(tensor, group=group, group_src=0)
    signal.pause()  # the store must outlive the receiver's last read


@pytest.fixture
def run_beside() -> Iterator[Callable]:
    """Run a function in a process beside this one, which ends with the test in any case."""
    processes: list[multiprocessing.Process] = []

    def run(call: Callable, *args: object) -> int:
        processes.append(multiprocessing.get_context("fork").Process(target=call, args=args, daemon=True))
        processes[-1].start()
        return processes[-1].pid

    yield run
    for process in processes:
        process.kill()
        process.join(PATIENCE)


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_frameworks_sender_in_another_process_is_received(service, newer, run_beside, load_format):
    pairs, port = named(newer), free_port()
    broadcasts = [tensor for _, tensor in pairs]
    if load_format == "flattened_bucket":
        broadcasts = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in broadcasts])]
    run_beside(send_as_a_framework_does, port, broadcasts)
    service.init_weights_update_group(HOST, str(port), 1, 2, "slime", "gloo", timeout_s=PATIENCE)
    assert service.state()["weight_groups"] == {"slime": "ready"}
    service.engine.pause_generation()
    service.update_weights_from_distributed(
        **specs_as_lists(pairs), group_name="slime", load_format=load_format, weight_version="5", timeout_s=PATIENCE
    )
    assert service.engine.is_paused
    service.continue_generation()
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))
    service.destroy_weights_update_group("slime")
    with pytest.raises(ValueError, match="does not exist"):
        service.destroy_weights_update_group("slime")


def test_a_sender_that_dies_half_way_leaves_the_old_weights(service, model, newer, run_beside):
    pairs, port, before = named(newer), free_port(), standing(service)
    sender = run_beside(send_as_a_framework_does, port, [tensor for _, tensor in pairs[:9]])
    service.init_weights_update_group(HOST, port, 1, 2, "slime", "gloo", timeout_s=PATIENCE)
    failed: list[BaseException] = []

    def update() -> None:
        try:
            service.update_weights_from_distributed(
                **specs_as_lists(pairs), group_name="slime", weight_version="5", timeout_s=PATIENCE
            )
        except TransferFailed as error:
            failed.append(error)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    wait_until(lambda: service.state()["weight_update"]["num_tensors_written"] >= 9)
    os.kill(sender, signal.SIGKILL)
    thread.join(PATIENCE)
    assert len(failed) == 1 and "rank 1 of group 'slime'" in str(failed[0])
    assert standing(service) == before
    assert answer(service) == greedy(model)
    assert "slime" in service.state()["weight_groups"] and service.state()["weight_groups"]["slime"] != "ready"


def test_what_is_wrong_with_a_request_is_said_before_anything_is_joined(service, newer):
    with pytest.raises(ValueError, match="does not exist"):
        service.update_weights_from_distributed(**specs_as_lists(named(newer)), group_name="nobody")
    for timeout_s in (0, -1.0):
        with pytest.raises(ValueError, match="timeout_s must be positive"):
            service.update_weights_from_disk("/nowhere", timeout_s=timeout_s)
    with pytest.raises(TransferFailed, match="rendezvous"):
        service.init_weights_update_group(HOST, free_port(), 1, 2, "slime", "gloo", timeout_s=0.3)
    assert service.state()["weight_groups"] == {}


def test_waiting_for_a_group_holds_nobody_up_and_can_be_ended(service, model):
    failed: list[BaseException] = []

    def join() -> None:
        try:
            service.init_weights_update_group(HOST, free_port(), 1, 2, "slime", "gloo", timeout_s=PATIENCE)
        except TransferFailed as error:
            failed.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    wait_until(lambda: service.state()["weight_groups"] == {"slime": "joining"})
    assert answer(service) == greedy(model)
    service.destroy_weights_update_group("slime")
    thread.join(PATIENCE)
    assert len(failed) == 1 and "cancelled" in str(failed[0])


# -- our own shared memory ---------------------------------------------------------------------------------------------


def test_buckets_that_cut_tensors_are_one_update_each_and_one_commit(service, newer, folder):
    sender = SharedMemorySender(1 << 15, folder)  # the embedding is larger than a bucket
    manifest = Manifest("5", specs_of(named(newer)))
    service.begin_weight_update(weight_version="5")
    num_buckets = num_tensors = 0
    for description in sender.buckets(named(newer), manifest):
        record = service.update_weights_from_tensor(descriptions=[description], verify=roots(newer))
        num_buckets, num_tensors = num_buckets + 1, num_tensors + record.num_tensors
    sender.close()
    assert num_buckets > 8 and num_tensors == len(named(newer))
    commit = service.end_weight_update()
    assert (commit.digest, commit.session.verified) == (digest_of(newer), True)


@pytest.mark.parametrize("is_sent", [True, False])
def test_digests_of_a_manifest_are_compared_with_the_buckets_that_follow_it(service, model, newer, folder, is_sent):
    before = standing(service)
    sender = SharedMemorySender(1 << 15, folder)
    manifest = Manifest("5", specs_of(named(newer)), roots(newer))
    service.begin_weight_update(weight_version="5", coverage="partial")
    buckets, differing = sender.buckets(named(newer if is_sent else model), manifest), set()
    for description in buckets:
        try:
            service.update_weights_from_tensor(descriptions=[description])
        except DigestMismatch as error:
            differing |= set(error.names)
    sender.close()
    if is_sent:
        commit = service.end_weight_update()
        assert (commit.digest, commit.session.verified, differing) == (digest_of(newer), True, set())
    else:
        assert differing == {name for name, root in roots(model).items() if root != roots(newer)[name]} != set()
        service.abort_weight_update()
        assert standing(service)[:2] == before[:2]


def test_a_delta_of_which_the_rest_does_not_come_is_freed_with_its_session(service, model, newer, folder):
    buffers = [(f"delta {index}", torch.zeros(1 << 15, dtype=torch.uint8)) for index in range(2)]
    sender = SharedMemorySender(1 << 15, folder)
    buckets = sender.buckets(buffers, Manifest("5", specs_of(buffers)))
    service.begin_weight_update(weight_version="5")
    service.update_weights_from_tensor(descriptions=[next(buckets)], load_format="delta")
    sender.close()
    assert list(service._shared_memory._packed.buffers())
    service.abort_weight_update()
    assert not list(service._shared_memory._packed.buffers()) and service._receiver._attached is None


@pytest.mark.parametrize("coverage", ["partial", None])
def test_buckets_that_cut_tensors_are_sent_without_a_session_too_and_in_one_of_partial_coverage(
    service, newer, folder, coverage
):
    sender = SharedMemorySender(1 << 15, folder)
    for part in (named(newer)[::2], named(newer)):  # the second update writes tensors of the first again
        if coverage is not None:
            service.begin_weight_update(coverage=coverage)
        records = [
            service.update_weights_from_tensor(descriptions=[description], verify=roots(newer))
            for description in sender.buckets(part, Manifest("5", specs_of(part)))
        ]
        assert sum(record.num_tensors for record in records) == len(part)
        assert {record.verified for record in records} == {True, False}  # of the latter no tensor ends in them
        commit = service.end_weight_update() if coverage is not None else service.commit_implicit_update()
    assert commit is None or commit.session.verified
    assert service.model_digest() == digest_of(newer)
    sender.close()


def test_a_bucket_that_is_left_out_is_found(service, newer, folder):
    before = standing(service)
    sender = SharedMemorySender(1 << 15, folder)
    service.begin_weight_update(weight_version="5")

    def push_all_but_the_second() -> None:
        for index, description in enumerate(sender.buckets(named(newer), Manifest("5", specs_of(named(newer))))):
            if index != 1:
                service.update_weights_from_tensor(descriptions=[description])

    with pytest.raises(TransferFailed, match=rf"did not arrive whole: {EMBED} bytes"):
        push_all_but_the_second()
    sender.close()
    assert service.state()["weight_update"]["state"] == "rolled_back"
    assert standing(service) == before


# -- disk --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_and_verified(service, newer, folder):
    save_folder(folder / "5", named(newer), "5")
    record = service.update_weights_from_disk(folder / "5", weight_version="5")
    assert record.verified and not service.engine.is_paused
    assert answer(service) == greedy(newer)
    assert standing(service) == ("5", digest_of(newer), 1, digest_of(newer))


def test_a_folder_of_a_part_of_the_model_needs_a_session_of_partial_coverage(service, model, folder):
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if "layers.1." not in name]
    save_folder(folder / "part", tensors)
    before = service.model_digest()
    with pytest.raises(ValueError, match=r"folder .*part lacks \d+ parameters of the model: .*layers\.1\..*partial"):
        service.update_weights_from_disk(folder / "part", weight_version="7")
    assert service.engine.weight_version != "7" and service.model_digest() == before
    service.begin_weight_update(weight_version="7", coverage="partial")
    service.update_weights_from_disk(folder / "part")
    service.end_weight_update()
    assert service.engine.weight_version == "7"


def test_a_checkpoint_of_transformers_is_read_without_digests(service, newer, folder):
    newer.save_pretrained(folder / "hf")
    assert not service.update_weights_from_disk(folder / "hf", weight_version="5").verified
    service.continue_generation()
    assert service.engine.weight_digest == digest_of(newer)


def test_keep_pause_pauses_afterwards_and_a_pause_stays_without_it(service, newer, folder):
    save_folder(folder / "5", named(newer), "5")
    service.update_weights_from_disk(folder / "5", keep_pause=True)
    assert service.engine.is_paused
    service.update_weights_from_disk(folder / "5")
    assert service.engine.is_paused
    service.continue_generation()
    service.update_weights_from_disk(folder / "5")
    assert not service.engine.is_paused
    with pytest.raises(ValueError, match="nowhere"):
        service.update_weights_from_disk(folder / "nowhere", keep_pause=True)
    assert not service.engine.is_paused


def test_a_damaged_folder_changes_nothing(service, model, newer, folder):
    before = standing(service)
    save_folder(folder / "5", named(newer), "5")
    [file] = (folder / "5").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(DigestMismatch, match="1 tensors"):
        service.update_weights_from_disk(folder / "5", weight_version="5")
    assert standing(service) == before
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match="5"):
        service.update_weights_from_disk(folder / "5", weight_version="5")
    assert standing(service) == before
    assert answer(service) == greedy(model)


def test_a_delta_folder_applies_to_its_base_only(service, model, newer, folder):
    chunks = list(encode_delta(dict(named(model)), named(newer)))
    save_delta(folder / "delta", None, "5", chunks)
    service.update_weights_from_disk(folder / "delta", weight_version="5")
    service.continue_generation()
    assert service.model_digest() == digest_of(newer)
    service.update_weights_from_disk(folder / "delta", weight_version="5")  # again: harmless
    service.continue_generation()
    assert service.model_digest() == digest_of(newer)
    with torch.no_grad():
        dict(service.engine.weights.resident_tensors())[EMBED].add_(1)
    before = service.model_digest()
    with pytest.raises(DigestMismatch, match=EMBED):
        service.update_weights_from_disk(folder / "delta", weight_version="6")
    assert service.model_digest() == before


@pytest.mark.parametrize("is_known", [True, False])
def test_a_delta_whose_chunks_have_no_digests_is_compared_with_the_digest_of_its_base(
    service, model, newer, folder, is_known
):
    base = digest_of(model)
    chunks = list(encode_delta(dict(named(model)), named(newer), chunk_digests=False))
    save_delta(folder / "delta", None, "5", chunks, base_model_digest=base)
    with torch.no_grad():  # elements that the delta leaves as they are
        changed = (newer.model.norm.weight != model.model.norm.weight).nonzero().flatten()
        dict(service.engine.weights.resident_tensors())[NORM][[i for i in range(8) if i not in changed]] += 1
    before = service.model_digest()
    if is_known:
        assert service.name_weights() == before
    with pytest.raises(DigestMismatch, match=rf"base .*{base}.* {before}"):
        service.update_weights_from_disk(folder / "delta", weight_version="5", delta_check="touched")
    assert service.model_digest() == before and service.state()["weight_update"]["state"] != "open"
    service.update_weights_from_named_tensors(named(model), weight_version="4")  # in the same session, uncommitted
    service.update_weights_from_disk(folder / "delta", weight_version="5", delta_check="touched")
    service.continue_generation()
    assert standing(service)[0::3] == ("5", digest_of(newer))


def test_a_delta_that_was_applied_already_is_known_by_the_digest_of_its_result_or_of_its_chunks(
    service, model, newer, folder
):
    base, states = digest_of(model), (dict(named(model)), named(newer))
    manifest = Manifest("5", specs_of(named(newer)), roots(newer), digest_of(newer))
    save_delta(folder / "result", None, "5", encode_delta(*states, chunk_digests=False), result=manifest,
               base_model_digest=base)  # fmt: skip
    save_delta(folder / "chunks", None, "5", encode_delta(*states), base_model_digest=base)
    for _ in range(2):
        service.update_weights_from_disk(folder / "result", weight_version="5", delta_check="touched")
        service.continue_generation()
    service.update_weights_from_disk(folder / "chunks", weight_version="5")
    service.continue_generation()
    assert service.model_digest() == digest_of(newer)


def test_a_checkpoint_is_pulled_without_touching_the_engine(service, newer, folder):
    save_folder(folder / "source" / "weight_v000003", named(newer), "3")
    before = standing(service)
    service.pull_weights(folder / "local", folder / "source", 3)
    assert standing(service) == before
    service.update_weights_from_disk(folder / "local", weight_version="3")
    service.continue_generation()
    assert standing(service)[0::3] == ("3", digest_of(newer))


# -- versions and values -----------------------------------------------------------------------------------------------


def test_a_version_is_relabelled_without_an_epoch_and_aborts_unless_told_not_to(service):
    service.engine.add(PROMPT, PARAMS, rid="a")
    service.engine.step()
    service.update_weight_version("7", abort_all_requests=False)
    assert (service.get_weight_version(), service.engine.epoch) == ("7", 0)
    assert service.state()["num_running"] == 1
    service.update_weight_version("8")
    [aborted] = service.engine.step()
    assert aborted.finish_reason.type == "abort"
    assert service.get_weight_version() == "8"


def test_a_version_given_during_a_session_is_the_sessions(service, newer):
    service.begin_weight_update()
    service.update_weights_from_named_tensors(named(newer))
    service.update_weight_version("7")
    assert service.get_weight_version() == "default"
    assert service.end_weight_update().version == service.get_weight_version() == "7"


def test_values_are_shown_by_name_and_cut(service, model):
    assert service.get_weights_by_name(NORM, 3) == model.model.norm.weight[:3].tolist()
    assert service.get_weights_by_name("lm_head.weight", 2) == model.lm_head.weight[:2, :2].tolist()
    assert len(service.get_weights_by_name(EMBED)) == 100
    with pytest.raises(ValueError, match="no_such"):
        service.get_weights_by_name("no_such")
    with pytest.raises(ValueError, match="truncate_size"):
        service.get_weights_by_name(NORM, 0)


# -- memory by tag -----------------------------------------------------------------------------------------------------


class CountedLock:
    """A lock that counts those who have asked for it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self.num_asked, self.release = lock, 0, lock.release

    def acquire(self, timeout: float) -> bool:
        self.num_asked += 1
        return self._lock.acquire(timeout=timeout)


@pytest.mark.parametrize("how", ["release", "reset"])
def test_weights_stay_under_a_session_that_is_being_opened(owned, newer, how):
    engaged, let_go = threading.Event(), threading.Event()
    holder = submit(owned.engine.between_steps, "hold", lambda: (engaged.set(), let_go.wait(PATIENCE)))
    assert engaged.wait(PATIENCE)
    calls = owned.sessions._manager._lock
    lock = calls._lock = CountedLock(calls._lock)
    opened = submit(owned.begin_weight_update)
    wait_until(lambda: lock.num_asked == 1)
    other = (
        submit(owned.release_memory_occupation, ["weights"])
        if how == "release"
        else submit(owned.weights_checker, "reset_tensors")
    )
    wait_until(lambda: lock.num_asked == 2)
    let_go.set()
    soon(holder), soon(opened)
    with pytest.raises(SessionError, match="a weight-update session is open"):
        soon(other)
    owned.update_weights_from_named_tensors(named(newer))
    owned.end_weight_update(weight_version="2")
    assert standing(owned)[:2] == ("2", digest_of(newer))


def test_an_open_session_keeps_all_memory(owned):
    owned.begin_weight_update(coverage="partial")
    with pytest.raises(SessionError, match="session is open"):
        owned.release_memory_occupation()
    assert owned.engine.kv_bytes and owned.engine.model.holds_weights
    owned.abort_weight_update()


def test_weights_of_an_implicit_session_keep_all_memory_until_it_is_committed(owned, newer):
    owned.update_weights_from_named_tensors(named(newer))
    with pytest.raises(SessionError, match="session is open"):
        owned.release_memory_occupation()
    assert owned.engine.kv_bytes and owned.engine.model.holds_weights
    owned.release_memory_occupation(["kv_cache"])
    owned.resume_memory_occupation(["kv_cache"])  # commits it
    owned.release_memory_occupation()
    assert not owned.engine.kv_bytes and not owned.engine.model.holds_weights


def test_the_engines_own_weights_are_released_come_back_empty_and_have_to_be_written(owned, model, newer):
    num_bytes = sum(tensor.nbytes for _, tensor in named(model))
    reports = owned.release_memory_occupation(["weights"])
    assert (reports["weights"].bytes_before, reports["weights"].bytes_after) == (num_bytes, 0)
    assert owned.release_memory_occupation(["weights"])["weights"].bytes_before == 0  # again: nothing to do
    for refused in (
        lambda: owned.engine.generate([PROMPT], PARAMS),
        owned.begin_weight_update,
        lambda: owned.update_weights_from_named_tensors(named(newer)),
        lambda: owned.get_weights_by_name(NORM),
        lambda: owned.weights_checker("checksum"),
    ):
        with pytest.raises(MemoryReleased, match="resume"):
            refused()
    assert not owned.state()["holds_weights"]
    for _ in range(2):
        assert owned.resume_memory_occupation(["weights"])["weights"].bytes_after == num_bytes
    with pytest.raises(SamplingRefused, match="update them first"):
        owned.engine.generate([PROMPT], PARAMS)
    pairs = named(newer)
    owned.update_weights_from_named_tensors(pairs[:5], weight_version="5")
    with pytest.raises(SamplingRefused, match=f"{len(pairs) - 5} weights"):
        owned.continue_generation()
    assert owned.engine.weight_digest is None  # weights with undefined values have no digest
    assert owned.finish_digest() is None
    owned.update_weights_from_named_tensors(pairs[5:], weight_version="5")
    owned.continue_generation()
    assert answer(owned) == greedy(newer)
    assert standing(owned)[1::2] == (digest_of(newer), digest_of(newer))


@pytest.mark.parametrize("how", ["released", "reset", "still released"])
def test_weights_that_hold_nothing_are_written_while_requests_wait(owned, newer, how):
    """Nobody else could help them: without the weights no step runs, and they would wait for ever."""
    if how == "reset":
        owned.weights_checker("reset_tensors")
    else:
        owned.release_memory_occupation(["weights"])
    if how == "released":
        owned.resume_memory_occupation(["weights"])
    owned.engine.add(PROMPT, PARAMS)
    if how == "still released":
        owned.resume_memory_occupation(["weights"])
    owned.update_weights_from_named_tensors(named(newer), weight_version="5")
    owned.continue_generation()
    assert answer(owned) == greedy(newer)
    assert owned.state()["metrics"]["num_finished"] == 2


def test_two_calls_release_the_weights_at_once(model, folder):
    model.save_pretrained(folder / "model")
    service = RolloutService(Engine(folder / "model", CONFIG))
    calls = service.sessions._manager._lock
    lock = calls._lock = CountedLock(calls._lock)
    roots, begun, others, before = service.sessions._roots, threading.Event(), [], standing(service)
    finish = roots.finish_digest

    def finish_after_the_other() -> str | None:
        if not begun.is_set():
            begun.set()
            others.append(submit(service.release_memory_occupation, ["weights"]))
            wait_until(lambda: others[0].done() or lock.num_asked == 2)
        return finish()

    roots.finish_digest = finish_after_the_other
    assert service.release_memory_occupation(["weights"])["weights"].bytes_after == 0
    assert soon(others[0])["weights"].bytes_after == 0
    with pytest.raises(MemoryReleased, match="no digest"):
        service.model_digest()
    assert service.name_weights() is None
    service.resume_memory_occupation()
    assert standing(service)[::3] == before[::3]
    service.close()


def test_released_weights_are_really_gone_also_where_a_commit_could_be_reverted(owned, newer):
    owned.update_weights_from_named_tensors(named(newer), weight_version="5")
    owned.continue_generation()
    [address] = {tensor.data_ptr() for name, tensor in owned.engine.weights.resident_tensors() if name == EMBED}
    owned.release_memory_occupation(["weights"])
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    assert tensors and not [tensor for tensor in tensors if tensor.numel() and tensor.data_ptr() == address]
    owned.resume_memory_occupation(["weights"])
    with pytest.raises(SessionError, match="no commit"):
        owned.revert_weight_update()


def test_the_trainers_weights_are_not_released(service, model):
    report = service.release_memory_occupation(["weights"])["weights"]
    assert report.bytes_before == report.bytes_after > 0
    service.resume_memory_occupation(["weights"])
    assert answer(service) == greedy(model)


def test_nothing_is_released_under_running_requests_or_an_open_session(owned, newer):
    owned.engine.add(PROMPT, PARAMS)
    owned.engine.step()
    for tags in (["weights"], ["kv_cache"], None):
        with pytest.raises(NotIdle, match="1 running"):
            owned.release_memory_occupation(tags)
    owned.engine.abort_request(abort_all=True)
    owned.begin_weight_update()
    with pytest.raises(SessionError, match="open"):
        owned.release_memory_occupation(["weights"])
    owned.abort_weight_update()
    with pytest.raises(ValueError, match="unknown memory tag: kv, lora"):
        owned.release_memory_occupation(["lora", "kv", "weights"])
    assert owned.state()["holds_weights"]


@pytest.mark.parametrize("by", ["named tensors", "payload", "disk", "session"])
def test_updates_work_while_the_kv_pool_is_released_in_the_order_of_colocated_trainers(owned, newer, folder, by):
    answer(owned)
    assert owned.engine.flush_cache().success
    owned.release_memory_occupation()
    assert (owned.state()["kv_bytes"], owned.state()["weight_bytes"]) == (0, 0)
    owned.resume_memory_occupation(["weights"])
    owned.engine.pause_generation("abort")
    assert owned.engine.flush_cache().success
    if by == "disk":
        save_folder(folder / "5", named(newer), "5")
        owned.update_weights_from_disk(folder / "5", weight_version="5")
    elif by == "payload":
        pairs = named(newer)
        for part in (pairs[:9], pairs[9:]):
            payload = serialize_for_engine(part, "flattened_bucket")
            owned.update_weights_from_tensor([payload], load_format="flattened_bucket", weight_version="5")
    else:
        if by == "session":
            owned.begin_weight_update(weight_version="5")
        owned.update_weights_from_named_tensors(named(newer), weight_version="5")
        if by == "session":
            owned.end_weight_update()
    owned.continue_generation()
    assert owned.get_weight_version() == "5"
    with pytest.raises(MemoryReleased, match="KV pool"):
        owned.engine.generate([PROMPT], PARAMS)
    owned.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert answer(owned) == greedy(newer)


def test_the_return_of_the_kv_pool_commits_what_came_before_it(owned, newer):
    """The order of calls of trainers that never pause over HTTP."""
    owned.release_memory_occupation(["kv_cache", "weights"])
    owned.resume_memory_occupation(["weights"])
    owned.update_weights_from_named_tensors(named(newer), weight_version="5")
    assert owned.engine.flush_cache().success and owned.get_weight_version() == "default"
    owned.resume_memory_occupation(["kv_cache"])
    assert owned.get_weight_version() == "5"
    assert answer(owned) == greedy(newer)


# -- buffers that belong to checkpoints -------------------------------------------------------------------------------


def test_the_digest_covers_buffers_of_checkpoints(make_model):
    model = with_router_biases(make_model("nemotron_h"))
    engine = Engine(model, CONFIG)
    service = RolloutService(engine)
    digests = []
    for step in range(2):
        with_router_biases(model, step)
        digests.append(service.commit_in_place(str(step), source=model.named_parameters()).digest)
        assert digests[-1] == service.model_digest() == model_digest(trainer_tensors(model))
    assert len(set(digests)) == 2
    service.close()


def test_weights_come_back_whole_without_their_buffers_which_are_not_released(make_model, tmp_path):
    model = with_router_biases(make_model("nemotron_h"))
    model.save_pretrained(tmp_path / "model")
    service = RolloutService(Engine(tmp_path / "model", CONFIG))
    digest = service.model_digest()
    service.release_memory_occupation(["weights"])
    service.resume_memory_occupation(["weights"])
    service.begin_weight_update(weight_version="again")
    service.update_weights_from_named_tensors(list(model.named_parameters()))
    assert service.end_weight_update().digest == digest
    service.engine.generate([PROMPT], PARAMS)
    service.close()
