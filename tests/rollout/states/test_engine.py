"""Models with recurrent layers in an engine: transformers' tokens, the trainer's bits, whatever is taken back."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from transformers import PreTrainedModel

from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.errors import MemoryReleased, OutOfMemory
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.rollout.states.tensors import StatePool
from lockstep.tests.support import random_models

MAMBA = ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "jamba", "zamba", "zamba2"]
WITHOUT_ATTENTION = ["mamba2", "mamba", "falcon_mamba"]
MAMBA += WITHOUT_ATTENTION
FAMILIES = ["lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", *MAMBA]
ALL_ATTEND = ["inkling", "inkling2", "deepseek_v4", "zaya"]  # whose layers all have attention beside their states
FAMILIES += [*ALL_ATTEND, "minimax"]
# The stand-in for stages in one process cannot run their layers.
NOT_LIKE_LLAMA = {"kimi_linear", "minimax", *MAMBA, *ALL_ATTEND}
# Granite's and Bamba's layers are Nemotron-H's and Falcon-H1's, Falcon-Mamba's are Mamba's with norms, and those of the
# MoE models LFM2's and Qwen3.5's, beside experts or MLPs that other families have. Of the others each has one dtype.
EXHAUSTIVE = {"granitemoehybrid", "bamba", "falcon_mamba", "lfm2_moe", "qwen3_5_moe"}
EXHAUSTIVE |= {
    *((name, torch.float32) for name in ("falcon_h1", "inkling", "qwen3_next", "kimi_linear", "minimax")),
    *((name, torch.float32) for name in ("lfm2", "jamba", "mamba2", "zamba")),
    *((name, torch.bfloat16) for name in ("nemotron_h", "inkling2", "deepseek_v4", "olmo_hybrid", "zaya")),
    *((name, torch.bfloat16) for name in ("qwen3_5", "mamba", "zamba2")),
}


def case(family: str, *others: object) -> ParameterSet:
    """Return a slow case of a test, or one of the exhaustive suite."""
    is_slow = EXHAUSTIVE.isdisjoint([family, (family, *others)])
    return pytest.param(family, *others, marks=pytest.mark.slow if is_slow else pytest.mark.exhaustive)


EVERY_FAMILY = pytest.mark.parametrize("family", [FAMILIES[0], *(case(family) for family in FAMILIES[1:])])
UNDIVIDED = {"falcon_h1", "bamba", "zamba", "zamba2", "zaya", *WITHOUT_ATTENTION}  # they bring no plan
ONE_STAGE, ONE_PART = (
    {*UNDIVIDED, "inkling2", "deepseek_v4", "jamba"},
    {*UNDIVIDED, "inkling"},
)  # they bring no plan of that kind
DTYPES = [torch.float32, torch.bfloat16]
STEM = [(11 * i + 3) % 250 for i in range(40)]
PROMPTS = [[3, 17, 90, 4, 55], [*STEM, *range(40, 60)], [250], [*STEM, 7, 8, 9]]
TEMPERATURE = 0.7
WAYS: dict[str, dict[str, object]] = {
    "chunk 1": {"chunked_prefill_size": 1}, "chunk 13": {"chunked_prefill_size": 13},
    "chunk 64": {"chunked_prefill_size": 64}, "chunk 100": {"chunked_prefill_size": 100},
    "overlap": {"overlap": True}, "no records": {"cuda_graph_batch_sizes": ()}, "no cache": {"prefix_cache": False},
    "no snapshots": {"state_snapshots": 0}, "one snapshot": {"state_snapshots": 1},
    "ahead": {"overlap": True, "cuda_graph_batch_sizes": (2, 3), "chunked_prefill_size": 13},
    "2 stages": {"stages": 2, "chunked_prefill_size": 13}, "3 stages": {"stages": 3, "chunked_prefill_size": 7},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(restore_threads):
    torch.set_num_threads(1)


@pytest.fixture
def make_engine(in_stages):
    """Make engines of small pools; stages: of the pipeline."""

    def make(model: PreTrainedModel, stages: int = 1, **config: object) -> Engine:
        settings = {"kv_cache": "64 blocks", "max_num_seqs": 4, **config}
        return Engine(model.train(), EngineConfig(**settings), make_runner=in_stages(stages))

    return make


def params(index: int = 0, num_new: int = 12, **others: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, temperature=TEMPERATURE, sampling_seed=index, **others)


def record(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.logprobs) for c in completions]


def assert_trainers_bits(engine: Engine, completions: Sequence[Completion], temperature: float = TEMPERATURE) -> None:
    """Compare with the trainer's forward over each sequence alone, over all padded, and over all packed in a row."""
    module, sequences = engine.model.trained_module, [torch.tensor(c.prompt_ids + c.token_ids) for c in completions]
    lengths = torch.tensor([len(ids) for ids in sequences])
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    with engine.model.training_numerics():
        alone = [module(ids[None], use_cache=False).logits[0] for ids in sequences]
        in_batch = module(padded, attention_mask=mask.long(), use_cache=False).logits
        packed = module(
            torch.cat(sequences)[None], position_ids=positions[None], cu_seq_lens_q=starts, cu_seq_lens_k=starts,
            use_cache=False,
        ).logits[0]  # fmt: skip
    for index, completion in enumerate(completions):
        forms = (alone[index], in_batch[index, : lengths[index]], packed[starts[index] : starts[index + 1]])
        for logits in forms:
            assert logits.requires_grad
            chosen = logits[completion.num_prompt_tokens - 1 : -1]
            logprobs = selected_logprobs(chosen, torch.tensor(completion.token_ids), temperature)
            assert list(completion.logprobs) == logprobs.tolist()


def generate(engine: Engine, prompts: Sequence[list[int]] = PROMPTS) -> list[Completion]:
    with engine.model.rollout_phase():
        answers = engine.generate(list(prompts), [params(index) for index in range(len(prompts))])
    engine.check_integrity()
    return answers


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h"])
def test_greedy_tokens_are_transformers_and_sampled_logprobs_the_trainers(make_model, make_engine, family):
    model = make_model(family)
    engine = make_engine(model, chunked_prefill_size=13)
    greedy = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0.0))
    model.eval()
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()
    model.train()
    assert_trainers_bits(engine, generate(engine))


@EVERY_FAMILY
def test_a_retraction_before_any_step_changes_no_bit(make_model, make_engine, family):
    engine = make_engine(make_model(family), chunked_prefill_size=13)
    whole, num_steps = _steps(engine, at=-1, mode="")
    for at, mode in itertools.product(range(num_steps), ("retract", "in_place")):
        answers, _ = _steps(engine, at, mode)
        assert record(answers) == record(whole)


def _steps(engine: Engine, at: int, mode: str) -> tuple[list[Completion], int]:
    """Run the prompts from an empty cache with a pause before step `at`; returns the answers and the number of
    steps."""
    assert engine.flush_cache().success
    done: dict[str, Completion] = {}
    num_steps = 0
    with engine.model.rollout_phase():
        for index, prompt in enumerate(PROMPTS):
            engine.add(prompt, params(index), rid=f"r{index}")
        while engine.has_work:
            if num_steps == at:
                engine.pause_generation(mode)
                engine.check_integrity()
                state = engine.state()
                num_used = state["num_state_slots"] - 1 - state["num_free_state_slots"]
                assert mode == "in_place" or num_used == state["num_state_snapshots"]
                engine.continue_generation()
            done |= {c.id: c for c in engine.step()}
            num_steps += 1
    engine.check_integrity()
    return [done[f"r{index}"] for index in range(len(PROMPTS))], num_steps


@EVERY_FAMILY
def test_a_prefix_hit_starts_from_a_snapshot_and_changes_no_bit(make_model, make_engine, family):
    model = make_model(family)
    cold, engine = make_engine(model, prefix_cache=False), make_engine(model, state_snapshots=12)
    prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[3], [*STEM, 1, 2], [*STEM, 9]]
    found = [generate(engine, [prompt])[0] for prompt in prompts]
    # A prompt's own snapshot; none at the stem's last block before a second prompt has left there, and from then on.
    assert [c.num_cached_tokens for c in found] == [0, 48, 0, 32, 32]
    assert record(found) == [record(generate(cold, [prompt]))[0] for prompt in prompts]
    longer = [*found[0].prompt_ids, *found[0].token_ids, 5, 6, 7]
    [answer] = generate(engine, [longer])
    assert answer.num_cached_tokens == 64
    assert record([answer]) == record(generate(cold, [longer]))
    assert_trainers_bits(engine, [*found, answer])


def test_samples_of_one_prompt_compute_it_once(make_model, make_engine):
    engine = make_engine(make_model("lfm2"), chunked_prefill_size=13)
    with engine.model.rollout_phase():
        answers = engine.generate(PROMPTS[1], params(n=4))
    assert [c.num_cached_tokens for c in answers] == [0, 48, 48, 48]
    assert_trainers_bits(engine, answers)


def test_samples_of_one_prompt_begin_at_once_where_no_snapshot_can_be_kept(make_model, make_engine):
    engine = make_engine(make_model("qwen3_5"), state_snapshots=0, kv_cache="256 blocks", num_scheduler_steps=1)
    ids, num_steps = engine.add(PROMPTS[-1], params(n=6, num_new=3)), 0
    with engine.model.rollout_phase():
        while engine.has_work:
            engine.step()
            num_steps += 1
    assert len(ids) == 6 and num_steps <= 6  # not one more prefill after another
    engine.close()


def test_a_commit_voids_snapshots_and_released_memory_comes_back(make_model, make_engine):
    engine = make_engine(make_model("lfm2"))
    first = generate(engine)
    state = engine.state()
    num_bytes = 13 * 2 * 2 * 64 * 4  # slots, recurrent layers, taps before the last, channels, float32
    assert (state["state_bytes"], state["num_state_slots"], state["max_state_snapshots"]) == (num_bytes, 13, 4)
    assert state["num_state_snapshots"] > 0
    engine.weights.commit_weights("1", None)
    assert engine.state()["num_state_snapshots"] == 0 and engine.state()["num_free_state_slots"] == 12
    generate(engine)
    kv_bytes = state["kv_bytes"]
    assert engine.weights.release_kv() == kv_bytes + num_bytes
    assert engine.state()["state_bytes"] == 0
    assert engine.weights.resume_kv() == kv_bytes + num_bytes
    assert record(generate(engine)) == record(first)


def test_pools_without_memory_for_states_stay_released_until_there_is_some(make_model, make_engine, monkeypatch):
    """The KV pool was allocated: steps ran without states, and the loop ended."""

    def fail(*_: object) -> None:
        raise OutOfMemory("no memory for states")

    engine = make_engine(make_model("lfm2"))
    with engine.model.rollout_phase():
        engine.weights.release_kv()
        with monkeypatch.context() as patched:
            patched.setattr(StatePool, "allocate", fail)
            with pytest.raises(OutOfMemory, match="no memory for states"):
                engine.weights.resume_kv()
        with pytest.raises(MemoryReleased):
            engine.generate(PROMPTS[:1], params())
        engine.weights.resume_kv()
        assert len(engine.generate(PROMPTS[:1], params())) == 1


def test_decode_steps_are_recorded(make_model, make_engine):
    engine = make_engine(make_model("lfm2"), speculation="off")
    with engine.model.rollout_phase():
        [answer] = engine.generate([PROMPTS[0]], params(num_new=30))
    records = engine.parts.runner._graphs._records
    assert [step.is_trusted for step in records.values()] == [True]
    assert_trainers_bits(engine, [answer])


def test_tensor_parallelism_and_unknown_recurrent_layers_are_refused_by_name(make_model):
    for family, name in (("lfm2", "Lfm2"), ("falcon_h1", "FalconH1"), ("zaya", "Zaya")):
        with pytest.raises(ValueError, match=f"{name}ForCausalLM brings no tensor-parallel plan"):
            Engine(make_model(family), EngineConfig(kv_cache="64 blocks", k_blocks=2))
    with pytest.raises(ValueError, match="shared_experts has the plan style 'all_reduce', which is not supported"):
        Engine(make_model("inkling"), EngineConfig(kv_cache="64 blocks", k_blocks=2))
    model = make_model("lfm2")
    model.config.layer_types = ["conv", "mamba", "conv"]
    with pytest.raises(ValueError, match="layers of type mamba"):
        Engine(model, EngineConfig(kv_cache="64 blocks"))
    model = make_model("nemotron_h")
    model.config.layers_block_type[2] = "mlp"
    with pytest.raises(ValueError, match=r"layers \[2\] call attention, but its configuration has layers \[0, 4\]"):
        Engine(model, EngineConfig(kv_cache="64 blocks"))
    with pytest.raises(ValueError, match="GraniteMoeHybridMambaLayer: a convolution with activation 'gelu'"):
        Engine(make_model("granitemoehybrid", hidden_act="gelu"), EngineConfig(kv_cache="64 blocks"))
    with pytest.raises(ValueError, match="state_snapshots must be a number of snapshots, at least 0, not -1"):
        EngineConfig(state_snapshots=-1)


def test_an_automatic_pool_counts_states(make_model, make_engine, monkeypatch):
    model = make_model("lfm2")
    engine = make_engine(model, kv_cache="auto", max_num_seqs=4)
    assert engine.parts.limits.max_num_seqs == 4
    per_slot = engine.parts.state_plan.bytes_per_slot
    monkeypatch.setattr("lockstep.rollout.loop.assemble.usable_bytes", lambda device: 2 * (1 + 3 * 2) * per_slot)
    engine = make_engine(model, kv_cache="auto", max_num_seqs=4)
    assert engine.parts.limits.max_num_seqs == 2 and engine.state()["num_state_slots"] == 7
    monkeypatch.setattr("lockstep.rollout.loop.assemble.usable_bytes", lambda device: 3 * per_slot)
    with pytest.raises(ValueError, match="no room for the recurrent states of one sequence"):
        make_engine(model, kv_cache="auto")


# -- every way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares", [pytest.param((0,), id="share"), pytest.param((0, 1), id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(
    ("family", "dtype"), [case(family, dtype) for family, dtype in itertools.product(FAMILIES, DTYPES)]
)
def test_every_way_of_running_gives_the_same_bits(make_model, make_engine, family, dtype, shares):
    """Of each family a half of the ways with each dtype, the other half in the next family."""
    model = make_model(family, dtype)
    plain = make_engine(model)
    expected = generate(plain)
    assert_trainers_bits(plain, expected)
    first = FAMILIES.index(family) + DTYPES.index(dtype)
    for number, config in enumerate(WAYS.values()):
        if (first + number) % 2 not in shares or (family in NOT_LIKE_LLAMA and "stages" in config):
            continue
        engine = make_engine(model, **config)
        for _ in range(2):  # the second time with hits
            assert record(generate(engine)) == record(expected)
        if engine.parts.runner.num_stages > 1:
            engine.parts.runner.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("falcon_h1", {"mamba_rms_norm": False, "time_step_limit": (0.3, 0.9)}),
        ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_conv_bias": False, "mamba_proj_bias": True}),
        ("nemotron_h", {"moe_latent_size": None, "n_group": 2, "time_step_min": 0.5}),
        ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope"}),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 3}),
        ("jamba", {"num_experts": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_dt_rank": 3}),
        ("mamba", {"tie_word_embeddings": False, "use_conv_bias": False, "use_bias": True, "residual_in_fp32": False}),
        ("zamba", {"n_mamba_heads": 1, "tie_word_embeddings": False}),  # its blocks are not shared then
        ("zamba2", {"use_mem_rope": False, "use_shared_attention_adapter": False, "num_mem_blocks": 2}),
    ],
)
def test_options_of_mamba_layers_change_no_bit_between_engine_and_trainer(make_model, make_engine, family, options):
    engine = make_engine(make_model(family, **options), chunked_prefill_size=13)  # it compares the module's own numbers
    assert_trainers_bits(engine, generate(engine))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_every_family_are_transformers(make_model, make_engine, family):
    model = make_model(family)
    found = make_engine(model).generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0.0))
    model.eval()
    for prompt, completion in zip(PROMPTS, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert list(completion.token_ids) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        *(case(family, 1, 2) for family in FAMILIES if family not in ONE_STAGE),
        *(case(family, 2, 1) for family in FAMILIES[1:] if family not in ONE_PART),
    ],
)
def test_several_ranks_give_the_bits_of_one_rank(make_model, run_world, family, tp, pp):
    own = random_models.FAMILIES[family][1]
    if "layer_types" in own and family not in ALL_ATTEND:
        kind = own["layer_types"][0]
        layers = [kind, kind, "full_attention", kind]  # the first of two stages has no attention
        model = make_model(family, num_hidden_layers=4, layer_types=layers)
    else:
        model = make_model(family)
    common = {"kv_cache": 64, "max_num_seqs": 3, "chunked_prefill_size": 13, "state_check_steps": 1, "k_blocks": tp}
    one = Engine(model, EngineConfig(**common))
    wanted, shapes = record(one.generate(PROMPTS, params(n=2))), one.model.state_shapes

    def rank(rank: int) -> object:
        engine = Engine(model, EngineConfig(tp=tp, pp=pp, **common))
        for layer, states in engine.model.state_shapes.items():
            for name, state in states.items():  # heads, or channels, are divided, the last inputs of convolutions not
                whole = shapes[layer][name].shape
                divided = (*whole[:-1], whole[-1] // tp) if family == "jamba" else (whole[0] // tp, *whole[1:])
                assert state.shape == (divided if name == "recurrent" else whole)
        pool = engine.parts.state_plan
        assert not engine.is_controller or pool.num_bytes == engine.state()["state_bytes"]
        assert pool.bytes_per_slot < one.parts.state_plan.bytes_per_slot or family in (*ALL_ATTEND, "lfm2_moe")
        prompts = PROMPTS if engine.is_controller else None
        found = [record(engine.generate(prompts, params(n=2))) for _ in range(2)]
        engine.close()
        return found

    assert run_world(2, rank) == [[wanted, wanted]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["text", "exact"])
@pytest.mark.parametrize("overlap", [False, True])
def test_jumps_that_take_tokens_back_keep_the_trainers_bits(make_model, bpe_tokenizer, mode, overlap):
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
              "città": {"enum": ["Paris", "Parma", "Rome"]}}, "required": ["name", "città"],
              "additionalProperties": False}  # fmt: skip
    model = make_model("lfm2", vocab_size=1024, eos_token_id=0)
    config = EngineConfig(kv_cache="64 blocks", max_num_seqs=3, overlap=overlap)
    engine = Engine(model.train(), config, tokenizer=bpe_tokenizer)
    asked = [params(i, 60, json_schema=schema, jump_forward=mode) for i in range(4)]
    with engine.model.rollout_phase():
        answers = engine.generate(["a person: ", "the name and the town", "{", "x"], asked)
    engine.check_integrity()
    metrics = engine.state()["metrics"]
    assert metrics["num_jump_forward_tokens"] > 0
    assert (metrics["num_rolled_back_tokens"] > 0) == (mode == "text")
    assert_trainers_bits(engine, answers)


def _random_traces() -> ModuleType:
    """Load the module of the random traces as a separate copy, with models that have recurrent layers."""
    path = Path(__file__).parents[1] / "test_interruption_random.py"
    spec = importlib.util.spec_from_file_location("random_traces_of_states", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "overlap", "num_stages"), [(0, False, 1), (1, True, 1), (2, False, 2), (3, False, 3)])
def test_random_events_lose_no_state(make_model, in_stages, monkeypatch, seed, overlap, num_stages):
    import random

    traces = _random_traces()
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
    traces.tiny_model = lambda: make_model("lfm2", **small)
    trace, dice = traces.Trace(traces.make_engine(overlap, in_stages(num_stages))), random.Random(seed)
    for name in dice.choices(list(traces.WEIGHTS), list(traces.WEIGHTS.values()), k=1000):
        trace.event(name, dice.randrange(10_000))
    trace.check_replay()
    trace.drain()
    assert trace.engine.state()["num_hit_tokens"] > 0
    assert trace.counts["retracted"] > 0 and trace.counts["preempted"] > 0
