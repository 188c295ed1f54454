"""Updates under the names and in the pieces in which models are published, over every path but folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.weights.test_published_folders import digest_of, newer
from lockstep.tests.support.callers import soon, submit
from lockstep.tests.support.framework_sender import serialize_for_engine
from lockstep.tests.support.vllm.trainer import HOST, GlooCommunicators, VllmTrainer
from lockstep.weight_sync.digests.model_digest import tensor_roots
from lockstep.weight_sync.errors import DigestMismatch
from lockstep.weight_sync.group.vllm_protocol import GROUP_NAME
from lockstep.weight_sync.layout.bucket import byte_view
from lockstep.weight_sync.manifest import Manifest, dtype_name, specs_of
from lockstep.weight_sync.same_host.shared_memory import SharedMemorySender
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transports.group import DistributedTransport

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
CONFIG = EngineConfig(kv_cache="16 blocks", max_num_seqs=4)
EXPERT = "model.layers.0.mlp.experts.1.gate_proj.weight"
LATE = EXPERT.replace(".1.", ".4.")  # one more than there are
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
OTHERS = ["lfm2_moe", "qwen3_5_moe", "nemotron_h", "kimi_linear", "deepseek_v4", "minimax"]  # some rename tensors, too


def published(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model as `save_pretrained` publishes them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def roots_of(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: root.hex() for name, root in tensor_roots(tensors.items()).items()}


@pytest.fixture
def make_service(shm) -> Iterator[Callable[..., RolloutService]]:
    made: list[RolloutService] = []

    def make(model: PreTrainedModel | Path) -> RolloutService:
        config = ServiceConfig(shared_memory_folder=shm, weight_timeout_s=20.0)
        made.append(RolloutService(Engine(model, CONFIG), config))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def service(make_model, make_service) -> RolloutService:
    return make_service(make_model("qwen3_moe"))


@pytest.fixture
def tensors(make_model, tmp_path) -> dict[str, Tensor]:
    """The published tensors of newer weights of the same model."""
    return published(newer(make_model("qwen3_moe")), tmp_path / "new")


@contextmanager
def unchanged(service: RolloutService) -> Iterator[None]:
    """Check that what happens inside leaves no trace."""
    before = service.model_digest(), service.engine.weight_version
    yield
    service.engine.generate([[1, 2, 3]], PARAMS)
    assert (service.model_digest(), service.engine.weight_version) == before


# -- paths ------------------------------------------------------------------------------------------------------------


def send_named(service: RolloutService, tensors: dict[str, Tensor], **options: object) -> object:
    return service.update_weights_from_named_tensors(iter(tensors.items()), **options)


def send_payload(service: RolloutService, tensors: dict[str, Tensor], **options: object) -> object:
    return service.update_weights_from_tensor([serialize_for_engine(tensors.items())], **options)


def send_bucket(service: RolloutService, tensors: dict[str, Tensor], **options: object) -> object:
    payload = serialize_for_engine(tensors.items(), "flattened_bucket")
    return service.update_weights_from_tensor([payload], load_format="flattened_bucket", **options)


def send_shared(service: RolloutService, tensors: dict[str, Tensor], **options: object) -> object:
    """Send by our own sender, in buckets that are smaller than an expert's matrix. Needs a session."""
    sender = SharedMemorySender(6 << 10, service.config.shared_memory_folder)
    try:
        manifest = Manifest(None, specs_of(tensors.items()))
        for description in sender.buckets(list(tensors.items()), manifest):
            record = service.update_weights_from_tensor(descriptions=[description], **options)
    finally:
        sender.close()
    return record


def send_broadcasts(service: RolloutService, tensors: dict[str, Tensor], *, packed: bool = False, **options) -> object:
    """Send by broadcasts, as other frameworks' trainers do."""
    service.groups.communicators = GlooCommunicators()
    world_size = 1 + service.engine.ranks.mesh.num_ranks
    trainer = VllmTrainer(world_size)
    joining = submit(trainer.join)
    service.join_vllm_trainer(1, world_size, master_address=HOST, master_port=trainer.port)
    soon(joining)
    wire = [tensor.contiguous() for tensor in tensors.values()]
    wire = [torch.cat([byte_view(tensor) for tensor in wire])] if packed else wire
    sending = submit(lambda: [trainer.broadcast(tensor) for tensor in wire])
    try:
        lists = (
            list(tensors), [dtype_name(t.dtype) for t in tensors.values()], [list(t.shape) for t in tensors.values()]
        )  # fmt: skip
        load_format = "flattened_bucket" if packed else None
        record = service.update_weights_from_distributed(*lists, GROUP_NAME, load_format=load_format, **options)
        soon(sending)
    finally:
        service.destroy_weights_update_group(GROUP_NAME)
        trainer.close()
    return record


def send_by_protocol(service: RolloutService, tensors: dict[str, Tensor], **options: object) -> None:
    """Send by our own protocol, in buckets that are smaller than an expert's matrix."""
    transport = DistributedTransport(bucket_bytes=6 << 10)
    try:
        manifest = Manifest(None, specs_of(tensors.items()))
        transport.send_as("lockstep", [LocalTarget(service)], manifest, tensors.items(), 20.0, **options)
    except TargetError as error:
        raise error.__cause__ or error from None  # as the verb raised it
    finally:
        transport.close()


send_packed_broadcasts = partial(send_broadcasts, packed=True)
PATHS = {
    "named": send_named,
    "payload": send_payload,
    "bucket": send_bucket,
    "shared": send_shared,
    "broadcasts": send_broadcasts,
    "packed": send_packed_broadcasts,
    "protocol": send_by_protocol,
}


@pytest.fixture(params=PATHS)
def send(request: pytest.FixtureRequest) -> Callable[..., object]:
    return PATHS[request.param]


@pytest.fixture(params=[path for path in PATHS if path != "shared"])  # buckets that cut tensors need a session
def send_whole(request: pytest.FixtureRequest) -> Callable[..., object]:
    return PATHS[request.param]


def check_update(
    service: RolloutService, send: Callable[..., object], tensors: dict[str, Tensor], model: PreTrainedModel
) -> None:
    """Check that published tensors make a verified commit of the model."""
    assert not tensors.keys() <= model.state_dict().keys(), "published as it is here"
    service.begin_weight_update(weight_version="1")
    send(service, tensors, verify=roots_of(tensors))
    commit = service.end_weight_update()
    assert commit.session is not None and commit.session.verified
    assert commit.session.coverage == "full" and commit.bytes_copied == sum(t.nbytes for t in tensors.values())
    assert (commit.version, commit.digest, service.model_digest()) == ("1", digest_of(model), digest_of(model))


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
def test_published_tensors_give_the_bits_of_the_folder(family, send, make_model, make_service, tmp_path):
    service, model = make_service(make_model(family)), newer(make_model(family))
    tensors = published(model, tmp_path / "new")
    check_update(service, send, tensors, model)
    other = make_service(make_model(family))
    other.update_weights_from_disk(tmp_path / "new")
    [found], [expected] = (one.engine.generate([[1, 2, 3]], PARAMS) for one in (service, other))
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert found.weight_digest == expected.weight_digest


@pytest.mark.parametrize("family", OTHERS)
def test_families_with_other_published_names_take_them(family, make_model, make_service, tmp_path):
    service, model = make_service(make_model(family)), newer(make_model(family))
    check_update(service, send_shared, published(model, tmp_path / "new"), model)


def test_an_update_outside_a_session_takes_published_names(send_whole, service, tensors, make_model):
    send_whole(service, tensors, weight_version="1")
    service.engine.generate([[1, 2, 3]], PARAMS)
    assert (service.engine.weight_version, service.engine.weight_digest) == (
        "1",
        digest_of(newer(make_model("qwen3_moe"))),
    )


def test_buckets_of_one_session_may_cut_between_experts_and_mix_both_names(service, tensors, make_model):
    model = newer(make_model("qwen3_moe"))
    whole = {name: tensor.detach() for name, tensor in model.named_parameters()}
    mixed = {FUSED: whole[FUSED]} | {
        name: tensor for name, tensor in tensors.items() if not re.search(r"layers\.0.*experts.*(gate|up)_proj", name)
    }
    names = sorted(mixed, key=lambda name: name[::-1])  # in another order than they lie in
    service.begin_weight_update(weight_version="1")
    for first in range(0, len(names), 5):
        send_named(service, {name: mixed[name] for name in names[first : first + 5]})
    assert service.state()["weight_update"]["missing"] == {"count": 0, "names": []}
    service.verify_weight_update(roots_of(mixed))
    commit = service.end_weight_update()
    assert commit.session.verified and commit.digest == digest_of(model)


def test_released_weights_are_written_by_published_tensors(tensors, make_model, make_service, tmp_path):
    make_model("qwen3_moe").save_pretrained(tmp_path / "old")
    service = make_service(tmp_path / "old")
    service.config = ServiceConfig(reload_on_resume=False)
    late = {EXPERT: tensors.pop(EXPERT)}
    for step in ("1", "2"):
        service.release_memory_occupation()
        service.resume_memory_occupation(["weights"])
        service.begin_weight_update(weight_version=step, coverage="partial")
        send_named(service, tensors)
        with pytest.raises(ValueError, match=f"not wholly written: {re.escape(EXPERT)}$"):
            service.end_weight_update()
        send_named(service, late)
        assert service.end_weight_update().digest == digest_of(newer(make_model("qwen3_moe")))
        service.resume_memory_occupation(["kv_cache"])
        assert service.engine.generate([[1, 2, 3]], PARAMS)[0].weight_version == step


# -- updates that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}), f"{EXPERT}: dtype bfloat16, resident float32"),
        (lambda t: t.update({EXPERT: t[EXPERT][1:].contiguous()}), f"{EXPERT}: shape [31, 64], resident [32, 64]"),
        (lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}), f"{EXPERT}: shape [64, 32], resident [32, 64]"),
        (lambda t: t.update({LATE: t[EXPERT]}), f"{LATE}: the model's {FUSED} is [4, 64, 64] and has no such piece"),
        (lambda t: t.update({"model.layers.9.more.weight": torch.zeros(2)}), "layers.9.more.weight: not a tensor"),
        (lambda t: t.update({FUSED: torch.zeros(4, 64, 64)}), f"bytes are also those of {FUSED}"),
    ],
    ids=["dtype", "shape", "turned", "no such expert", "unknown", "whole and in pieces"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["payload", "shared", "broadcasts", "protocol"])
def test_tensors_that_do_not_fit_are_named_before_anything_is_written(path, edit, message, service, tensors):
    edit(tensors)
    service.begin_weight_update(weight_version="1")
    with pytest.raises(ValueError, match=re.escape(message)):
        PATHS[path](service, tensors)
    assert service.state()["weight_update"]["num_tensors_written"] == 0
    with unchanged(service):
        service.abort_weight_update()


def test_an_iterator_that_names_bytes_twice_leaves_no_trace(service, tensors):
    tensors[FUSED] = torch.zeros(4, 64, 64)
    with unchanged(service), pytest.raises(ValueError, match=f"{FUSED}: some of its bytes were written already as"):
        send_named(service, tensors)


@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_an_expert_that_comes_twice_in_one_update_is_named(coverage, service, tensors):
    digest = service.model_digest()
    service.begin_weight_update(coverage=coverage)
    twice = [(EXPERT, tensors[EXPERT]), (EXPERT, tensors[EXPERT])]
    with pytest.raises(ValueError, match=f"{re.escape(EXPERT)}: named more than once"):
        service.update_weights_from_named_tensors(twice)
    service.update_weights_from_named_tensors(twice[:1])
    if coverage == "full":
        with pytest.raises(ValueError, match=f"{re.escape(EXPERT)}: written already in this transaction"):
            service.update_weights_from_named_tensors(twice[:1])
    else:
        service.update_weights_from_named_tensors(twice[:1])
    service.abort_weight_update()
    assert service.model_digest() == digest


@pytest.mark.parametrize("coverage", ["full", "partial"])
def test_experts_that_are_missing_are_named_and_may_follow(coverage, service, tensors, make_model):
    late = {name: tensors.pop(name) for name in (EXPERT, EXPERT.replace("gate", "down"))}
    service.begin_weight_update(coverage=coverage)
    send_named(service, tensors)
    missing = service.state()["weight_update"]["missing"]
    assert missing["count"] == 2 and set(missing["names"]) == set(late)
    with pytest.raises(ValueError) as error:
        service.end_weight_update()
    assert str(error.value).startswith("2 tensors were not wholly written: ") and all(
        n in str(error.value) for n in late
    )
    send_named(service, late)
    assert service.end_weight_update().digest == digest_of(newer(make_model("qwen3_moe")))


def test_requests_wait_for_the_experts_that_an_update_outside_a_session_lacks(service, tensors, make_model):
    late = {EXPERT: tensors.pop(EXPERT)}
    send_named(service, tensors, weight_version="1")
    with pytest.raises(ValueError, match=f"1 tensors were not wholly written: {re.escape(EXPERT)}$"):
        service.commit_implicit_update()
    send_named(service, late)
    service.commit_implicit_update()
    assert service.engine.weight_digest == digest_of(newer(make_model("qwen3_moe")))


def test_a_sender_that_fails_between_two_experts_leaves_no_trace(service, tensors):
    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            if name == EXPERT:
                raise RuntimeError("the trainer is gone")
            yield name, tensor

    with unchanged(service), pytest.raises(RuntimeError, match="the trainer is gone"):
        service.update_weights_from_named_tensors(broken())
    send_named(service, tensors, weight_version="1")
    service.commit_implicit_update()


# -- digests ----------------------------------------------------------------------------------------------------------


def test_a_wrong_digest_of_one_expert_takes_an_update_outside_a_session_back(send_whole, service, tensors):
    digests = roots_of(tensors) | {EXPERT: "0" * 64}
    with unchanged(service), pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
        send_whole(service, tensors, verify=digests)


def test_sending_the_expert_again_repairs_a_session(service, tensors, make_model):
    damaged = tensors | {EXPERT: tensors[EXPERT] + 1}
    service.begin_weight_update(weight_version="1")
    send_named(service, damaged)
    with pytest.raises(DigestMismatch, match=re.escape(EXPERT)) as error:
        service.verify_weight_update(roots_of(tensors))
    assert list(error.value.names) == [EXPERT]
    with pytest.raises(ValueError, match=f"1 tensors were not wholly written: {re.escape(EXPERT)}$"):
        service.end_weight_update()
    old = make_model("qwen3_moe").state_dict()[FUSED]
    assert torch.equal(service.engine.model.module.state_dict()[FUSED][1, :32], old[1, :32]), "not restored"
    send_named(service, {EXPERT: tensors[EXPERT]}, verify=roots_of(tensors))
    commit = service.end_weight_update()
    assert commit.session.verified and commit.digest == digest_of(newer(make_model("qwen3_moe")))
    service.revert_weight_update()
    assert service.model_digest() == digest_of(make_model("qwen3_moe"))


def test_digests_under_the_other_names_are_compared_too(service, tensors, make_model):
    """A trainer may hash what it holds, and send what others understand."""
    model = newer(make_model("qwen3_moe"))
    service.begin_weight_update()
    send_named(service, tensors)
    service.verify_weight_update(roots_of(dict(model.named_parameters())))
    assert service.end_weight_update().session.verified
    service.begin_weight_update()
    send_named(service, dict(model.named_parameters()))
    service.verify_weight_update(roots_of(tensors))
    with pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
        service.verify_weight_update({EXPERT: "0" * 64})
    send_named(service, {EXPERT: tensors[EXPERT]})
    assert service.end_weight_update().digest == digest_of(model)


def test_digests_of_the_modules_tensors_are_compared_with_their_pieces(send_whole, service, tensors, make_model):
    digests, damaged = roots_of(dict(newer(make_model("qwen3_moe")).named_parameters())), tensors[EXPERT] + 1
    with unchanged(service), pytest.raises(DigestMismatch, match=re.escape(FUSED)):
        send_whole(service, tensors | {EXPERT: damaged}, verify=digests)
    record = send_whole(service, tensors, verify=digests)
    assert record is None or record.verified  # our own protocol returns none
    assert service.model_digest() == digest_of(newer(make_model("qwen3_moe")))


def test_values_are_found_by_published_names(service, make_model, tmp_path):
    tensors = published(make_model("qwen3_moe"), tmp_path / "old")
    assert service.get_weights_by_name(EXPERT, 3) == tensors[EXPERT][:3, :3].tolist()
    with pytest.raises(ValueError, match="no parameter is named"):
        service.get_weights_by_name(LATE)


# -- families and layouts ---------------------------------------------------------------------------------------------


def test_pieces_of_unknown_sizes_are_refused_by_name(make_model, make_service):
    """q, k and v of a convolution of olmo_hybrid differ in size: the name alone does not say where one lies."""
    service = make_service(make_model("olmo_hybrid"))
    name = "model.layers.0.linear_attn.k_conv1d.weight"
    with (
        unchanged(service),
        pytest.raises(ValueError, match=f"{name}: cannot be placed in the model's .*conv1d.weight"),
    ):
        send_named(service, {name: torch.zeros(32, 1, 4)})


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_each_rank_takes_its_part_of_published_tensors(tp, pp, make_model, run_world, tmp_path):
    old, new = make_model("qwen3_moe"), newer(make_model("qwen3_moe"))
    tensors, expected = published(new, tmp_path / "new"), digest_of(new)
    digests, damaged = roots_of(tensors), tensors | {EXPERT: tensors[EXPERT] + 1}

    def rank(rank: int) -> object:
        config = EngineConfig(tp=tp, pp=pp, k_blocks=4, kv_cache="64 blocks", max_num_seqs=4, rank_timeout_s=60.0)
        service = RolloutService(Engine(old, config))
        before, found = service.model_digest(), []
        with pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
            send_named(service, damaged, verify=digests)
        found.append(service.model_digest() == before)
        service.begin_weight_update(weight_version="1")
        send_named(service, damaged)
        with pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
            service.verify_weight_update(digests)
        with pytest.raises(ValueError, match=f"not wholly written: {re.escape(EXPERT)}"):
            service.end_weight_update()
        record = send_payload(service, {EXPERT: tensors[EXPERT]}, verify=digests)
        commit = service.end_weight_update()
        found += [record.verified, commit.session.verified, commit.digest == expected == service.model_digest()]
        found.append(service.get_weights_by_name(EXPERT, 40) == tensors[EXPERT][:40, :40].tolist())
        service.close()
        return found

    for found in run_world(tp * pp, rank):
        assert found == [True] * 5


def test_ranks_that_follow_receive_broadcasts_of_published_tensors(make_model, run_world, tmp_path):
    old, new = make_model("qwen3_moe"), newer(make_model("qwen3_moe"))
    tensors, expected = published(new, tmp_path / "new"), digest_of(new)

    def rank(rank: int) -> object:
        config = EngineConfig(tp=2, k_blocks=4, kv_cache="32 blocks", max_num_seqs=4, rank_timeout_s=60.0)
        service = RolloutService(Engine(old, config), ServiceConfig(weight_timeout_s=20.0))
        service.groups.communicators = GlooCommunicators()
        if rank:
            service.engine.follow()
            service.close()
            return None
        before = service.model_digest()
        with pytest.raises(DigestMismatch, match=re.escape(EXPERT)):
            send_broadcasts(service, tensors, verify=roots_of(tensors) | {EXPERT: "0" * 64})
        found = [service.model_digest() == before]
        late = {EXPERT: tensors.pop(EXPERT)}
        send_broadcasts(service, tensors, verify=roots_of(tensors))
        with pytest.raises(ValueError, match=f"1 tensors were not wholly written: {re.escape(EXPERT)}$"):
            service.commit_implicit_update()
        send_packed_broadcasts(service, late, weight_version="1")
        [answer] = service.engine.generate([[1, 2, 3]], PARAMS)
        found += [answer.weight_version == "1", answer.weight_digest == expected == service.model_digest()]
        service.close()
        return found

    assert run_world(2, rank)[0] == [True] * 3
