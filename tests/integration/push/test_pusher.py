"""Pushes to several engines: all of them have the new version afterwards, or all of them the old one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from lockstep.integration.push.adapters.trainer_tensors import trainer_tensors
from lockstep.integration.push.failures import PushFailed
from lockstep.integration.push.local_target import LocalTarget
from lockstep.integration.push.pusher import WeightPusher, pieces_of
from lockstep.integration.service import RolloutService
from lockstep.integration.service_config import ServiceConfig
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.integration.weights.sessions.callers import Slow, named
from lockstep.tests.support.callers import soon, submit, wait_until
from lockstep.tests.support.pushes import TRANSPORTS, digest_of, standing, train
from lockstep.tests.support.random_models import with_router_biases
from lockstep.weight_sync.digests.model_digest import model_digest
from lockstep.weight_sync.manifest import specs_of
from lockstep.weight_sync.target import TargetError
from lockstep.weight_sync.transports.disk import DiskTransport

PATIENCE = 20.0  # seconds; far more than any wait here takes
PARAMS = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture
def services(model, shm) -> Iterator[list[RolloutService]]:
    engines = [Engine(copy.deepcopy(model), EngineConfig(kv_cache="16 blocks", max_num_seqs=4)) for _ in range(2)]
    services = [RolloutService(engine, ServiceConfig(shared_memory_folder=shm)) for engine in engines]
    yield services
    for service in services:
        service.close()


@pytest.fixture
def make_pusher(services, shm):
    made: list[WeightPusher] = []

    def make(transport: str, targets: list | None = None, **options: object) -> WeightPusher:
        targets = targets or [LocalTarget(service, f"e{index}") for index, service in enumerate(services)]
        made.append(WeightPusher(targets, TRANSPORTS[transport](shm), **{"timeout_s": PATIENCE, **options}))
        return made[-1]

    yield make
    for pusher in made:
        pusher.close()


class Failing(LocalTarget):
    """A target that fails at the n-th call of a verb, before it or, with its answer lost, after it."""

    def __init__(
        self, service: RolloutService, verb: str, nth: int = 1, *, is_done: bool = False, kind: str = ""
    ) -> None:
        super().__init__(service, "the failing one")
        self._verb, self._left, self._is_done, self._kind = verb, nth, is_done, kind

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        self._left -= verb == self._verb
        fails = verb == self._verb and self._left == 0
        if fails and not self._is_done:
            raise TargetError(self.name, verb, "lost", self._kind)
        answer = super().call(verb, timeout_s=timeout_s, **arguments)
        if fails:
            raise TargetError(self.name, verb, "its answer was lost", self._kind)
        return answer


# -- pushes that land --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if not name.startswith(("delta", "disk"))])
def test_tensors_whose_names_come_with_them_are_sent_in_pieces(make_pusher, services, model, transport, monkeypatch):
    monkeypatch.setattr("lockstep.integration.push.pusher.PIECE_BYTES", 20_000)
    pusher, drawn = make_pusher(transport), []

    def gathered() -> Iterator:
        for name, tensor in trainer_tensors(model):
            drawn.append(name)
            yield name, tensor

    for version in ("1", "2"):
        train(model)
        pushed = pusher.push_tensors(gathered(), None, version)
        assert pushed.digest == digest_of(model) and pushed.sent.num_bytes == sum(t.nbytes for t in model.parameters())
        assert [standing(service) for service in services] == [(version, pushed.digest)] * 2
    assert drawn == 2 * [name for name, _ in trainer_tensors(model)]


def test_a_piece_is_as_large_as_asked_for_or_one_tensor():
    sizes = [8, 4, 4, 40, 4]
    drawn = [(str(number), torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes)]
    assert [[len(tensor) for _, tensor in piece] for piece in pieces_of(iter(drawn), 12)] == [[8, 4], [4], [40], [4]]
    assert [*pieces_of([], 12)] == []


def test_a_stream_that_breaks_or_lacks_a_tensor_leaves_all_old_weights(make_pusher, services, model, monkeypatch):
    monkeypatch.setattr("lockstep.integration.push.pusher.PIECE_BYTES", 20_000)
    before = [standing(service) for service in services]
    train(model)
    lacking = [*trainer_tensors(model)][:-1]

    def broken() -> Iterator:
        yield from lacking
        raise RuntimeError("the gathering broke")

    for tensors, why in ((broken(), "the gathering broke"), (lacking, "norm.weight")):
        with pytest.raises(PushFailed, match=why):
            make_pusher("tensor", timeout_s=5.0).push_tensors(tensors, None, "1")
        assert [standing(service) for service in services] == before
    with pytest.raises(ValueError, match="DiskTransport needs to know all names"):
        make_pusher("disk").push_tensors(trainer_tensors(model), None, "1")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_weights_to_all_targets(make_pusher, services, model, transport):
    pusher = make_pusher(transport)
    services[0].engine.generate([list(range(40))], PARAMS)
    for version in ("1", "2", "3"):
        train(model)
        pushed = pusher.push(model, version)
        assert pushed.digest == digest_of(model)
        for service in services:
            assert standing(service) == (version, pushed.digest)
            assert service.engine.weight_digest == pushed.digest
            assert not service.engine.is_paused
            session = service.state()["weight_update"]["last_commit"]["session"]
            assert (session["coverage"], session["verified"]) == ("full", True)
    if transport.startswith("delta"):
        assert 0 < pushed.sent.density < 0.1
    assert len({tuple(s.engine.generate([[1, 2, 3]], PARAMS)[0].token_ids) for s in services}) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_of_checkpoints_are_a_part_of_the_model(make_model, shm, transport):
    """Routers choose experts by biases that are buffers, and trainers write them."""
    model = make_model("nemotron_h")
    service = RolloutService(
        Engine(copy.deepcopy(model), EngineConfig(kv_cache="16 blocks", max_num_seqs=4)),
        ServiceConfig(shared_memory_folder=shm),
    )
    pusher = WeightPusher([LocalTarget(service)], TRANSPORTS[transport](shm), timeout_s=PATIENCE)
    digests = set()
    for step in range(3):
        with_router_biases(model, step)
        pushed = pusher.push(model, str(step))
        assert pushed.digest == model_digest(trainer_tensors(model)) == service.engine.weight_digest
        assert standing(service) == (str(step), pushed.digest)
        digests.add(pushed.digest)
        tokens = service.engine.generate([[1, 2, 3]], PARAMS)[0].token_ids
        expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert list(tokens) == expected[0, 3:].tolist()
    assert len(digests) == 3
    pusher.close()
    service.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_whose_elements_share_memory_is_refused_before_any_write(make_model, shm, transport, kind):
    model = make_model("qwen3")
    model.model.register_buffer("scales", torch.ones(5))
    hosted = copy.deepcopy(model)
    if kind == "buffer":
        name, shared = "model.scales", hosted.model.scales
    else:
        name, shared = "model.norm.weight", hosted.model.norm.weight
    shared.data = torch.ones(1).expand(shared.shape)
    service = RolloutService(
        Engine(hosted, EngineConfig(kv_cache="16 blocks", max_num_seqs=4)), ServiceConfig(shared_memory_folder=shm)
    )
    pusher = WeightPusher([LocalTarget(service)], TRANSPORTS[transport](shm), timeout_s=PATIENCE)
    before, expected = standing(service), service.engine.generate([[1, 2, 3]], PARAMS)[0].token_ids
    train(model)
    with pytest.raises(PushFailed, match=f"{name}: elements of the resident tensor share memory.*contiguous"):
        pusher.push(model, "1")
    assert standing(service) == before and not service.engine.is_paused
    assert service.engine.generate([[1, 2, 3]], PARAMS)[0].token_ids == expected
    shared.data = shared.data.contiguous()
    assert pusher.push(model, "1").digest == model_digest(trainer_tensors(model)) == service.model_digest()
    pusher.close()
    service.close()


def test_a_target_that_was_paused_stays_so_and_the_others_go_on(make_pusher, services, model):
    services[1].engine.pause_generation("in_place")
    train(model)
    make_pusher("tensor").push(model, "1")
    assert [service.engine.is_paused for service in services] == [False, True]
    assert [standing(service)[0] for service in services] == ["1", "1"]


def test_a_pusher_that_closes_takes_its_group_along(make_pusher, services, model):
    for version in ("1", "2"):
        pusher = make_pusher("distributed")
        pusher.push(model, version)
        assert [len(service.state()["weight_groups"]) for service in services] == [1, 1]
        pusher.close()
        assert [len(service.state()["weight_groups"]) for service in services] == [0, 0]


def test_a_pause_ends_with_the_lease_of_a_pusher_that_is_lost(make_pusher, services, model, caplog):
    """It was killed after these calls; one engine was paused by another client."""
    services[1].engine.pause_generation("in_place")

    class Watched(LocalTarget):
        def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
            if verb == "begin_weight_update":
                super().call(verb, timeout_s=timeout_s, **{**arguments, "lease_s": 0.05})
                raise TargetError(self.name, verb, "its answer was lost")
            if verb in ("abort_weight_update", "continue_generation"):
                raise TargetError(self.name, verb, "the pusher is killed")
            return super().call(verb, timeout_s=timeout_s, **arguments)

    targets = [Watched(service, f"e{index}") for index, service in enumerate(services)]
    with pytest.raises(PushFailed, match="its answer was lost"):
        make_pusher("tensor", targets).push(model, "1")
    wait_until(lambda: not services[0].engine.is_paused)
    wait_until(lambda: services[1].state()["weight_update"]["state"] == "rolled_back")
    assert services[1].engine.is_paused
    assert "the client of a weight update is lost" in caplog.text


@pytest.mark.parametrize("last", ["pause_generation", "end_weight_update"])
def test_an_engine_goes_on_by_itself_where_its_pusher_is_killed_after(make_pusher, services, model, last):
    """Killed right after its pause, before a session has begun, or after its commit; one engine was paused by
    another client."""
    services[1].pause_generation("in_place")
    killed: set[str] = set()

    class Watched(LocalTarget):
        def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
            if self.name in killed:
                raise TargetError(self.name, verb, "the pusher is killed")
            given = {**arguments, "ttl": 0.05} if "ttl" in arguments else arguments
            answer = super().call(verb, timeout_s=timeout_s, **given)
            if verb == last:
                killed.add(self.name)
            return answer

    targets = [Watched(service, f"e{index}") for index, service in enumerate(services)]
    if last == "pause_generation":
        with pytest.raises(PushFailed, match="the pusher is killed"):
            make_pusher("tensor", targets).push(model, "1")
    else:
        make_pusher("tensor", targets).push(model, "1")
        assert [service.engine.weight_version for service in services] == ["1", "1"]
    wait_until(lambda: not services[0].engine.is_paused)
    assert services[1].engine.is_paused


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_running_requests_go_on_with_the_new_version(make_pusher, services, model, mode):
    service = services[0]
    service.engine.add([1, 2, 3], SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        service.engine.step()
    train(model)
    make_pusher("tensor", pause_mode=mode).push(model, "1")
    done = []
    while not done:
        done = service.engine.step()
    spans = [(span.version, span.start, span.end) for span in done[0].weight_versions]
    assert spans == [("default", 0, 4), ("1", 4, 9)]


def test_a_dtype_is_cast_on_the_way(make_model, shm):
    model = make_model("qwen2")
    engine = Engine(copy.deepcopy(model).to(torch.bfloat16), EngineConfig(kv_cache="16 blocks", max_num_seqs=4))
    service = RolloutService(engine)
    train(model)
    pusher = WeightPusher([LocalTarget(service)], DiskTransport(shm), dtype=torch.bfloat16, timeout_s=PATIENCE)
    pushed = pusher.push(model, "1")
    cast = [(name, parameter.to(torch.bfloat16)) for name, parameter in model.named_parameters()]
    assert pushed.digest == model_digest(cast) == service.model_digest()
    service.close()


def test_a_rank_without_targets_only_gathers_and_learns_of_the_failure(model):
    pusher = WeightPusher([], None)
    assert pusher.push(model, "1") is None
    with pytest.raises(PushFailed, match="the sender broke"):
        WeightPusher([], None, share=lambda error: "the sender broke").push(model, "1")
    with pytest.raises(ValueError, match="transport"):
        WeightPusher([Failing(None, "state")], None)  # type: ignore[arg-type]


# -- pushes that fail --------------------------------------------------------------------------------------------------

FAILURES = [
    ("disk", "pause_generation", 1),
    ("disk", "flush_cache", 1),
    ("disk", "begin_weight_update", 1),
    ("disk", "update_weights_from_disk", 1),
    ("disk", "verify_weight_update", 1),
    ("disk", "end_weight_update", 1),
    ("tensor", "update_weights_from_tensor", 1),
    ("tensor", "update_weights_from_tensor", 3),
    ("distributed", "init_weights_update_group", 1),
    ("distributed", "update_weights_from_distributed", 1),
]


@pytest.mark.parametrize("is_done", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize(("transport", "verb", "nth"), FAILURES)
def test_where_one_target_fails_all_keep_the_old_version_and_the_next_push_lands(
    make_pusher, services, model, transport, verb, nth, is_done
):
    before = [standing(service) for service in services]
    failing = Failing(services[0], verb, nth, is_done=is_done)
    pusher = make_pusher(transport, [failing, LocalTarget(services[1], "the other one")])
    train(model)
    with pytest.raises(PushFailed, match="the failing one") as failed:
        pusher.push(model, "1")
    assert "the failing one" in failed.value.failures
    assert failed.value.stranded == ()
    assert [standing(service) for service in services] == before
    assert all(service.state()["weight_update"]["state"] != "open" for service in services)
    assert services[1].engine.is_paused is False
    assert services[0].engine.is_paused is False
    assert pusher.push(model, "1").digest == digest_of(model)
    assert {standing(service) for service in services} == {("1", digest_of(model))}


class Dying(Failing):
    """A target that stops answering from a certain call on."""

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        if self._left <= 0:
            raise TargetError(self.name, verb, "it is dead")
        return super().call(verb, timeout_s=timeout_s, **arguments)


@pytest.mark.parametrize("is_done", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize(("transport", "verb", "nth"), FAILURES)
def test_where_one_target_dies_the_others_keep_the_old_version_and_it_is_named(
    make_pusher, services, model, transport, verb, nth, is_done
):
    before = [standing(service) for service in services]
    dying = Dying(services[0], verb, nth, is_done=is_done)
    pusher = make_pusher(transport, [dying, LocalTarget(services[1], "the other one")])
    train(model)
    with pytest.raises(PushFailed, match="the failing one") as failed:
        pusher.push(model, "1")
    has_begun = verb not in ("pause_generation", "flush_cache", "begin_weight_update")
    assert failed.value.stranded == (("the failing one",) if has_begun else ())
    assert standing(services[1]) == before[1] and not services[1].engine.is_paused
    state = services[0].state()["weight_update"]
    if state["state"] == "open":
        assert state["seconds_left"] < 2 * PATIENCE  # then its lease rolls it back, as this does
        services[0].abort_weight_update()
    assert standing(services[0]) in (before[0], ("1", digest_of(model)))


class Busy(LocalTarget):
    """A target whose answer to a verb is lost while the verb runs. It goes on after `num_refused` further calls that it
    keeps waiting too long, or with `finish`."""

    def __init__(self, service: RolloutService, model: nn.Module, verb: str, num_refused: int) -> None:
        super().__init__(service, "the busy one")
        self._verb, self._slow, self._num_left = verb, Slow(named(model)), num_refused
        self._running: Future | None = None

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        if verb == self._verb and self._running is None:
            self._running = submit(self._run, verb, timeout_s, arguments)
            assert self._slow.under_way.wait(PATIENCE)
            raise TargetError(self.name, verb, "no answer")
        try:
            return super().call(verb, timeout_s=timeout_s, **arguments)
        except TargetError as error:
            if "waited 0.05 s for another call that is under way" in error.message:
                self._num_left -= 1
                if self._num_left == 0:
                    self.finish()
            raise

    def finish(self) -> None:
        self._slow.go_on.set()
        soon(self._running)

    def _run(self, verb: str, timeout_s: float, arguments: dict[str, object]) -> None:
        if verb == "end_weight_update":
            self.service.sessions._manager.commit(prepare=lambda: list(self._slow), client=arguments["client"])
        else:
            self.service.update_weights_from_named_tensors(self._slow, client=arguments["client"])


@pytest.fixture
def impatient(services) -> RolloutService:
    """A service whose calls wait a moment for another one that is under way."""
    services.append(RolloutService(services.pop(0).engine, ServiceConfig(weight_timeout_s=0.05)))
    return services[-1]


@pytest.mark.parametrize("num_refused", [1, 2])
@pytest.mark.parametrize("verb", ["update_weights_from_disk", "end_weight_update"])
def test_a_target_that_is_still_busy_is_asked_again_until_it_says_how_its_update_ended(
    make_pusher, impatient, services, model, verb, num_refused
):
    before = [standing(service) for service in services]
    targets = [Busy(impatient, model, verb, num_refused), LocalTarget(services[0], "the other one")]
    train(model)
    with pytest.raises(PushFailed, match=r"the busy one: .*: no answer") as failed:
        make_pusher("disk", targets).push(model, "1")
    assert failed.value.stranded == ()
    assert [standing(service) for service in services] == before
    assert not any(service.engine.is_paused for service in services)
    assert all(service.state()["weight_update"]["state"] == "rolled_back" for service in services)


def test_a_target_that_stays_busy_is_stranded_and_says_what_it_waits_for(
    make_pusher, impatient, services, model, caplog
):
    before = standing(services[0])
    busy = Busy(impatient, model, "update_weights_from_disk", num_refused=-1)
    train(model)
    with pytest.raises(PushFailed, match="could not be taken back from: the busy one") as failed:
        make_pusher("disk", [busy, LocalTarget(services[0], "the other one")], timeout_s=0.5).push(model, "1")
    assert failed.value.stranded == ("the busy one",)
    assert "another call that is under way (update from this process)" in caplog.text
    assert standing(services[0]) == before and not services[0].engine.is_paused
    busy.finish()
    assert impatient.state()["weight_update"]["state"] == "open"  # until its lease ends
    impatient.abort_weight_update()


@pytest.mark.parametrize("verb", ["release_weight_undo", "continue_generation"])
def test_what_fails_after_the_commit_takes_nothing_back(make_pusher, services, model, verb):
    pusher = make_pusher("disk", [Failing(services[0], verb), LocalTarget(services[1], "the other one")])
    train(model)
    pusher.push(model, "1")
    assert {standing(service) for service in services} == {("1", digest_of(model))}
    assert services[0].engine.is_paused is (verb == "continue_generation")


@pytest.mark.parametrize("transport", ["delta over disk", "delta over tensor"])
def test_a_delta_whose_push_failed_is_followed_by_a_full_one(make_pusher, services, model, transport):
    failing = Failing(services[0], "verify_weight_update", nth=2)
    pusher = make_pusher(transport, [failing, LocalTarget(services[1], "the other one")])
    pusher.push(model, "1")
    train(model)
    with pytest.raises(PushFailed):
        pusher.push(model, "2")
    assert {service.engine.weight_version for service in services} == {"1"}
    assert pusher.push(model, "2").sent.density is None
    train(model)
    assert pusher.push(model, "3").sent.density < 0.1
    assert {standing(service) for service in services} == {("3", digest_of(model))}


def test_a_delta_on_weights_that_somebody_else_changed_is_refused_and_mended(make_pusher, services, model):
    pusher = make_pusher("delta over disk")
    pusher.push(model, "1")
    with torch.no_grad():
        next(iter(services[0].engine.weights.resident_tensors()))[1].add_(1)
    train(model)
    with pytest.raises(PushFailed, match="e0"):
        pusher.push(model, "2")
    pusher.push(model, "2")
    assert {standing(service) for service in services} == {("2", digest_of(model))}


def test_a_wrong_byte_on_the_way_fails_the_push_everywhere(make_pusher, services, model):
    before = [standing(service) for service in services]

    class Damaging(LocalTarget):
        def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
            if verb == "verify_weight_update":
                with torch.no_grad():
                    dict(self.service.engine.weights.resident_tensors())["model.norm.weight"][0] += 1
            return super().call(verb, timeout_s=timeout_s, **arguments)

    targets = [Damaging(services[0], "the damaged one"), LocalTarget(services[1], "the other one")]
    train(model)
    with pytest.raises(PushFailed, match=r"the damaged one.*model\.norm\.weight"):
        make_pusher("disk", targets).push(model, "1")
    assert [standing(service) for service in services] == before


def test_a_model_that_does_not_fit_one_target_reaches_none(make_model, services, shm, make_pusher):
    before = [standing(service) for service in services]
    other = make_model("qwen2", num_hidden_layers=1)
    for transport in ("disk", "tensor", "distributed"):
        with pytest.raises(PushFailed, match="e1"):
            make_pusher(transport).push(other, "1")
        assert [standing(service) for service in services] == before
        assert not any(service.engine.is_paused for service in services)


def test_somebody_elses_session_is_left_alone(make_pusher, services, model):
    services[0].begin_weight_update(weight_version="theirs")
    with pytest.raises(PushFailed, match=r"e0.*already open"):
        make_pusher("disk").push(model, "1")
    state = services[0].state()["weight_update"]
    assert (state["state"], state["version"]) == ("open", "theirs")
    assert services[1].state()["weight_update"]["state"] != "open"


def test_an_exception_of_the_trainer_leaves_no_session_open(make_pusher, services, model):
    before = [standing(service) for service in services]

    def broken() -> Iterator:
        pairs = list(model.named_parameters())
        yield from pairs[:3]
        raise RuntimeError("the gathering broke")

    for transport in ("disk", "tensor", "distributed"):
        with pytest.raises(PushFailed, match="this process: the gathering broke"):
            make_pusher(transport, timeout_s=5.0).push_tensors(broken(), specs_of(model.named_parameters()), "1")
        assert [standing(service) for service in services] == before
        assert all(service.state()["weight_update"]["state"] == "rolled_back" for service in services)


def test_without_undo_a_failed_push_says_which_targets_it_stranded(make_pusher, services, model):
    failing = Failing(services[0], "verify_weight_update")
    pusher = make_pusher("disk", [failing, LocalTarget(services[1], "the other one")], undo="none")
    train(model)
    with pytest.raises(PushFailed, match="could not be taken back") as failed:
        pusher.push(model, "1")
    assert set(failed.value.stranded) == {"the failing one", "the other one"}
    assert all(service.engine.is_paused and "poisoned" in service.engine.refusal for service in services)
    pusher.push(model, "1")  # full and verified: it heals
    assert {standing(service) for service in services} == {("1", digest_of(model))}
    assert all(service.engine.refusal is None for service in services)


class Interrupted(LocalTarget):
    """A target that is interrupted, as by Ctrl-C, before or after a verb."""

    def __init__(self, service: RolloutService, verb: str, is_done: bool) -> None:
        super().__init__(service, "the interrupted one")
        self._verb, self._is_done, self._is_over = verb, is_done, False

    def call(self, verb: str, *, timeout_s: float, **arguments: object) -> dict[str, object]:
        is_now = verb == self._verb and not self._is_over
        self._is_over |= is_now
        if is_now and not self._is_done:
            raise KeyboardInterrupt
        answer = super().call(verb, timeout_s=timeout_s, **arguments)
        if is_now:
            raise KeyboardInterrupt
        return answer


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "verb", ["pause_generation", "begin_weight_update", "verify_weight_update", "end_weight_update",
             "release_weight_undo"]
)  # fmt: skip
def test_an_interrupt_leaves_no_target_paused_and_all_with_the_same_weights(
    make_pusher, services, model, verb: str, is_done: bool
) -> None:
    targets = [LocalTarget(services[0], "e0"), Interrupted(services[1], verb, is_done)]
    before = standing(services[0])
    train(model)
    with pytest.raises(KeyboardInterrupt):
        make_pusher("tensor", targets).push(model, "1")
    committed = verb == "release_weight_undo"
    for service in services:
        assert standing(service) == (("1", digest_of(model)) if committed else before)
        assert service.state()["weight_update"]["state"] != "open"
        assert len(service.engine.generate([[1, 2, 3]], PARAMS)) == 1  # neither paused nor refused
        assert not service.engine.is_paused
