"""Tests of decode steps at recorded sizes: plain steps' numbers, the same memory in every step, no stale record."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from lockstep.kernels.attention.cpp import SOURCE
from lockstep.kernels.machine import native
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.model import numerics
from lockstep.rollout.request_options import RequestOptions
from lockstep.rollout.running.cpu_graphs import PLAIN_STEPS, CPUGraphs
from lockstep.rollout.running.decode_graphs import DecodeGraphs, decode_ladder, why_not_recorded
from lockstep.rollout.running.recorders import CUDAGraphs, Recorder, Run, first_host_read
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.support.covering import covering

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NATIVE = pytest.mark.skipif(native.load(SOURCE) is None, reason="needs a C++ compiler")
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(5)]


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


def make_engine(model, *sizes: int, **config: object) -> Engine:
    settings = {"kv_cache": "96 blocks", "max_num_seqs": 8, **config}
    return Engine(model, EngineConfig(**{"speculation": "off"} | settings, cuda_graph_batch_sizes=sizes))


def params(seed: int, **others: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 6 + 5 * seed, "sampling_seed": seed, "ignore_eos": True, **others})


def answers(engine: Engine, prompts=PROMPTS, **others: object) -> list[tuple]:
    found = engine.generate(prompts, [params(seed, **others) for seed in range(len(prompts))])
    return [(c.token_ids, c.logprobs, c.finish_reason, c.top_logprobs) for c in found]


def graphs_of(engine: Engine) -> DecodeGraphs:
    return engine.parts.runner._graphs


class Counting:
    """A recorder that counts the records of another recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.num_recorded = recorder, 0

    def record(self, run: Run) -> Run:
        self.num_recorded += 1
        return self._recorder.record(run)


def count_records(engine: Engine) -> Counting:
    """Count the records of a fresh engine from now on."""
    graphs = graphs_of(engine)
    assert not graphs._records
    graphs._recorder = counting = Counting(graphs._recorder)
    return counting


def addresses(graphs: DecodeGraphs) -> list[int]:
    """Return the addresses of all buffers."""
    owners = (graphs._buffers, graphs._buffers.settings)
    values = [getattr(owner, field.name) for owner in owners for field in fields(owner)]
    return [value.data_ptr() for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_tables_are_as_wide_as_a_sequence_that_fills_the_pool_and_not_as_the_longest_context(make_model, speculation):
    model = make_model("qwen3")
    few, plain = (
        make_engine(model, *sizes, kv_cache="5 blocks", max_model_len=512, speculation=speculation)
        for sizes in ((1, 2), ())
    )
    wide = make_engine(model, 1, 2, kv_cache="5 blocks", max_model_len=40)
    assert graphs_of(few)._buffers.block_tables.shape[1] == few.parts.ledger.num_blocks == 5
    assert graphs_of(wide)._buffers.block_tables.shape[1] == 3
    for _ in range(2):
        found, expected = (
            [engine.generate([[3, 1, 4] * 2], params(seed, max_new_tokens=200))[0] for seed in range(2)]
            for engine in (few, plain)
        )
        assert [(c.token_ids, c.logprobs, c.finish_reason) for c in found] == [
            (c.token_ids, c.logprobs, c.finish_reason) for c in expected
        ]
        assert found[0].num_completion_tokens == 5 * 16 - 6 + 1  # all slots are filled; the last token needs none
        few.weights.release_kv()
        few.weights.resume_kv()
    few.check_integrity()


def test_a_sequence_gets_a_block_ahead_while_another_is_in_its_last_one(make_model):
    model, prompts = make_model("qwen3"), [[1] * 50, [2] * 26]  # of 4 blocks and of 2, of the 4 that a context has
    plain, ahead = (make_engine(model, *sizes, max_model_len=64, overlap=bool(sizes)) for sizes in ((), (1, 2)))
    assert answers(ahead, prompts, max_new_tokens=30) == answers(plain, prompts, max_new_tokens=30)
    assert ahead.parts.runner.num_begun > 10


def test_the_ladder_is_what_was_asked_for_up_to_the_largest_batch_and_a_gpus_own_ends_with_it():
    assert decode_ladder((), 32, CPU) == ()
    assert decode_ladder(None, 11, CPU) == (*range(1, 9), 10, 11)
    assert decode_ladder(None, 1000, CPU)[-2:] == (240, 256)
    assert decode_ladder([16, 4, 64, 4], 32, CPU) == (4, 16, 32)
    gpu = torch.device("cuda")
    assert decode_ladder(None, 20, gpu) == (1, 2, 4, 8, 16, 20)
    assert decode_ladder(None, 1, gpu) == (1,)
    assert decode_ladder(None, 1000, gpu)[-2:] == (248, 256)
    assert decode_ladder((), 1000, gpu) == ()


@pytest.mark.parametrize("sizes", [5, (0, 2), ("4",), (True,)])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="cuda_graph_batch_sizes must be a list of positive integers"):
        EngineConfig(cuda_graph_batch_sizes=sizes)


@covering(2, rest="slow", family=["qwen3", "gpt_oss"], dtype=[torch.float32, torch.bfloat16], overlap=[False, True])
def test_padding_five_sequences_to_eight_changes_no_bit(make_model, family, dtype, overlap):
    model = make_model(family, dtype)
    expected = answers(make_engine(model))
    engine = make_engine(model, 8, overlap=overlap)
    records = count_records(engine)
    assert answers(engine) == expected
    assert records.num_recorded == 1 and graphs_of(engine)._num_steps > 20
    assert (engine.parts.runner.num_begun > 20) == overlap
    engine.close()


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "overlap"])
def test_stop_tokens_filters_and_what_the_host_has_a_say_in_come_out_the_same(make_model, overlap):
    model = make_model("qwen3")
    plain, graphed = make_engine(model), make_engine(model, 2, 4, 8, overlap=overlap)
    cases = [
        {"stop_token_ids": list(range(40))}, {"top_p": 0.7}, {"top_k": 5, "temperature": 2.0}, {"min_p": 0.1},
        {"temperature": 0.0}, {"frequency_penalty": 1.0}, {"logit_bias": {"3": 5.0}},
        {"min_new_tokens": 5, "stop_token_ids": list(range(100))},
    ]  # fmt: skip
    for case in cases:
        assert answers(graphed, **case) == answers(plain, **case), case
    mixed = [params(0), params(1, top_k=3), params(2, temperature=0.0), params(3, presence_penalty=0.5), params(4)]
    options = RequestOptions(top_logprobs_num=2, token_ids_logprob=(1, 2))
    for wanted in (None, options):
        found = [e.generate(PROMPTS, mixed, options=wanted) for e in (plain, graphed)]
        assert [(c.token_ids, c.logprobs, c.top_logprobs, c.listed_logprobs) for c in found[0]] == [
            (c.token_ids, c.logprobs, c.top_logprobs, c.listed_logprobs) for c in found[1]
        ]
    graphed.close()


def test_batches_beyond_the_ladder_run_as_they_are(make_model):
    model = make_model("qwen3")
    engine = make_engine(model, 2)
    records = count_records(engine)
    assert answers(engine) == answers(make_engine(model))
    # The two longest of five outputs: 5 steps of two sequences, and 5 of one.
    assert graphs_of(engine)._num_steps == 10 and records.num_recorded == 1


def test_every_step_runs_in_the_same_memory_and_a_weight_commit_records_nothing_anew(make_model):
    model = make_model("qwen3")
    engine = make_engine(model, 4, 8)
    graphs, records = graphs_of(engine), count_records(engine)
    before = addresses(graphs)
    answers(engine)
    answers(engine, PROMPTS[:3])
    assert records.num_recorded == 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    engine.weights.commit_weights("louder", None)
    assert answers(engine) == answers(make_engine(model))
    assert records.num_recorded == 2 and addresses(graphs) == before


def test_only_block_tables_that_grew_are_sent(make_model):
    engine = make_engine(make_model("qwen3"), 4)
    [completion] = engine.generate([[1] * 20], params(0, max_new_tokens=40))
    assert len(completion.token_ids) == 40
    # Four rows, three of them padding; 20 tokens lie in two blocks, and the third and fourth come later.
    assert graphs_of(engine).num_tables_sent == 4 * 3


def test_weights_that_somebody_moves_between_two_steps_are_read_where_they_are(make_model):
    model = make_model("qwen3")
    engine = make_engine(model, 1)
    with engine.model.rollout_phase(), torch.no_grad():
        engine.add([1] * 20, params(0, max_new_tokens=60))
        for _ in range(30):
            engine.step()
        moved = model.lm_head.weight.detach().clone()
        model.lm_head.weight.detach().zero_()  # what a stale record would read
        model.lm_head.weight.data = moved
        found = []
        while engine.has_work:
            found += engine.step()
    [expected] = make_engine(make_model("qwen3"), 1).generate([[1] * 20], params(0, max_new_tokens=60))
    assert (found[0].token_ids, found[0].logprobs) == (expected.token_ids, expected.logprobs)


def test_memory_that_was_released_or_moved_is_recorded_anew(make_model, tmp_path):
    model = make_model("qwen3")
    expected = answers(make_engine(model))
    engine = make_engine(model, 8)
    records = count_records(engine)
    assert answers(engine) == expected
    engine.weights.release_kv()
    assert not graphs_of(engine)._records  # they would keep their memory
    engine.weights.resume_kv()
    assert answers(engine) == expected
    assert records.num_recorded == 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.25  # by a trainer, between two phases
    engine.weights.commit_weights("moved", None)
    assert answers(engine) == answers(make_engine(model)) != expected
    assert records.num_recorded == 3
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 0.5)  # another object
    assert answers(engine) == answers(make_engine(model))
    assert records.num_recorded == 4


def test_weights_that_were_released_are_recorded_anew(make_model, tmp_path):
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    expected = answers(make_engine(model))
    engine = make_engine(tmp_path / "model", 8)
    records = count_records(engine)
    assert answers(engine) == expected
    engine.weights.release_weights()
    engine.weights.resume_weights()
    with torch.no_grad():
        for name, tensor in engine.model.resident_tensors():
            tensor.copy_(model.get_parameter(name))
    assert answers(engine) == expected
    assert records.num_recorded <= 2  # memory may come back where it was


class Unruly:
    """A recorder that runs a step several times before its first call, as a capture does."""

    def __init__(self) -> None:
        self.num_runs = 0

    def record(self, run):
        for _ in range(3):
            run()
            self.num_runs += 1
        return run


def test_running_a_step_several_times_as_a_capture_does_changes_nothing(make_model):
    model = make_model("qwen3")
    expected = answers(make_engine(model))
    for overlap in (False, True):
        engine = make_engine(model, 1, 2, 4, 8, overlap=overlap)
        graphs_of(engine)._recorder = recorder = Unruly()
        assert answers(engine) == expected
        assert recorder.num_runs == 12
        engine.close()


def test_a_step_that_fails_ahead_of_its_time_starts_everybody_over(make_model):
    model = make_model("qwen3")
    expected = answers(make_engine(model))
    engine = make_engine(model, 8, overlap=True)
    graphs, forward, calls = graphs_of(engine), engine.model.forward, []

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) == 1 + PLAIN_STEPS:  # the last plain one
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)

    graphs._model.forward = failing
    ids = [engine.add(prompt, params(seed))[0] for seed, prompt in enumerate(PROMPTS)]
    found = {}

    def run_all() -> None:
        with engine.model.rollout_phase():
            while engine.has_work:
                found.update({c.id: c for c in engine.step()})

    with pytest.raises(RuntimeError, match="out of memory"):
        run_all()
    assert engine.state()["num_running"] == 0
    run_all()
    assert [found[id].token_ids for id in ids] == [tokens for tokens, *_ in expected]
    assert [found[id].logprobs for id in ids] == [logprobs for _, logprobs, *_ in expected]
    engine.close()


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_model(make_model):
    return make_model("qwen3", torch.bfloat16).cuda()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_captured_steps_give_the_numbers_of_plain_ones(gpu_model, overlap):
    expected = answers(make_engine(gpu_model))
    engine = make_engine(gpu_model, 1, 2, 4, 8, overlap=overlap)
    assert isinstance(graphs_of(engine)._recorder, CUDAGraphs)
    records = count_records(engine)
    assert answers(engine) == expected == answers(engine)
    assert records.num_recorded == 4


@pytest.mark.gpu
@GPU
def test_steps_are_captured_anew_after_kv_was_released(gpu_model):
    engine = make_engine(gpu_model, 1, 2, 4, 8)
    expected = answers(engine)
    for _ in range(2):
        engine.weights.release_kv()  # with it goes the last graph of the memory pool
        engine.weights.resume_kv()
        assert answers(engine) == expected


@pytest.mark.gpu
@GPU
def test_replay_reads_weights_that_were_updated_in_place(gpu_model):
    engine = make_engine(gpu_model, 8, overlap=True)
    records = count_records(engine)
    answers(engine)
    with torch.no_grad():
        for parameter in gpu_model.parameters():
            parameter.mul_(1.25)
    engine.weights.commit_weights("louder", None)
    assert answers(engine) == answers(make_engine(gpu_model))
    assert records.num_recorded == 1


@pytest.mark.gpu
@GPU
def test_decode_steps_wait_for_nothing_but_their_results_and_allocate_nothing(gpu_model):
    engine = make_engine(gpu_model, 8, overlap=True, kv_cache="256 blocks")
    for seed, prompt in enumerate(PROMPTS):
        engine.add(prompt, params(seed, max_new_tokens=200))
    runner = engine.parts.runner
    with engine.model.rollout_phase():
        for _ in range(20):
            engine.step()
        began, allocated = runner.num_begun, []
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                engine.step()
                allocated.append(torch.cuda.memory_stats()["allocated_bytes.all.current"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert runner.num_begun == began + 50
        assert len(set(allocated[10:])) == 1
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(50):
            engine.step()
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments


@NATIVE
def test_steps_begin_ahead_while_no_source_proposes_anything(make_model):
    model = make_model("qwen3")
    engine = make_engine(model, 8, overlap=True, speculation={"caller": 4})
    assert answers(engine) == answers(make_engine(model))
    assert engine.parts.runner.num_begun > 10
    engine.close()


def test_drafts_have_rows_in_recorded_steps(make_model):
    config = EngineConfig(kv_cache="8 blocks", max_num_seqs=2)
    sizes = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), 34)
    assert graphs_of(Engine(make_model("qwen3"), config)).sizes == sizes


def test_a_cpu_records_steps_of_modules_that_ask_nothing_of_the_data(make_model):
    default = EngineConfig(kv_cache="8 blocks", max_num_seqs=2, speculation="off")
    graphs = graphs_of(Engine(make_model("qwen3"), default))
    assert graphs.sizes == (1, 2) and isinstance(graphs._recorder, CPUGraphs)
    assert isinstance(graphs_of(Engine(make_model("qwen3_moe"), default))._recorder, CPUGraphs)
    # Without invariant mode, experts are transformers' own.
    engine = Engine(make_model("qwen3_moe"), replace(default, invariant=False))
    assert isinstance(graphs_of(engine)._recorder, CPUGraphs)


def test_experts_of_other_products_are_not_recorded_for_a_reason_that_is_named(make_model, monkeypatch):
    config = EngineConfig(kv_cache="8 blocks", max_num_seqs=2)
    assert why_not_recorded(Engine(make_model("qwen3_moe"), config).parts.model) is None
    monkeypatch.setattr(numerics, "grouped_routes", lambda module, guarantee: None)
    model = Engine(make_model("qwen3_moe"), config).parts.model
    assert why_not_recorded(model) == "its experts read on the host which of them are chosen"


def test_a_step_in_which_the_host_reads_data_is_told_before_a_capture():
    x, places = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    assert first_host_read(lambda: [torch.relu(x[places]).sum(0)]) is None
    assert first_host_read(lambda: [x * x.max().item()]) == "aten._local_scalar_dense.default"
    assert first_host_read(lambda: [x[x > 2]]) == "aten.index.Tensor"
    assert first_host_read(lambda: [x.index_put((places, places), x[:, 0].sum())]) is None
    assert first_host_read(lambda: [x.index_put((x > 2,), x.sum())]).startswith("aten.index_put")
    assert first_host_read(lambda: [torch.unique(x), torch.nonzero(x)]).startswith("aten._unique")


@pytest.mark.gpu
@GPU
def test_a_gpu_runs_such_a_step_as_it_is(caplog):
    x = torch.arange(6.0, device="cuda")
    graphs = CUDAGraphs(x.device)

    def reads():
        return [x * x.max().item()]

    assert graphs.record(reads) is reads and "aten._local_scalar_dense" in caplog.text
    record = graphs.record(lambda: [x + 1])
    x += 1
    assert torch.equal(record()[0], x + 1)
