"""Models that ranks share: every division gives the bits of the undivided one, and each rank has only its part."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lockstep.kernels.attention.paged import PagedStep
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.rollout.model.steps.context import StepContext
from lockstep.rollout.ranks.mesh import Mesh
from lockstep.rollout.sharding.part import copy_part, load_part
from lockstep.rollout.sharding.skeleton import skeleton_of

BLOCK_SIZE, BLOCKS_EACH = 16, 4
SEQUENCES = {0: 40, 1: 23}  # tokens by sequence
STEPS = [[(0, 0, 17)], [(0, 17, 18), (1, 0, 20)], [(0, 18, 37), (1, 20, 21)], [(0, 37, 40), (1, 21, 23)]]
OPTIONS = {"dtype": None, "device": None}
FLOATS = [torch.float32, torch.bfloat16]


@dataclass
class Rank:
    """One rank of a replica that runs STEPS: it has its own KV, and passes hidden states to the next stage."""

    hosted: HostedModel
    logits: list[Tensor] = field(default_factory=list)

    def run(self) -> list[Tensor]:
        """Run STEPS; returns all logits on every rank of the last stage, and nothing on other ranks."""
        hosted, mesh = self.hosted, self.hosted.mesh
        caches = [
            [
                torch.zeros(len(SEQUENCES) * BLOCKS_EACH, BLOCK_SIZE, s.num_kv_heads, dim, dtype=s.dtype)
                for s, dim in ((s, getattr(s, name)) for s in hosted.kv_shapes)
            ]
            for name in ("key_dim", "value_dim")
        ]
        with hosted.rollout_phase(), torch.inference_mode():
            for work in STEPS:
                tokens, positions, step = _step(work, caches)
                hidden = None
                if not mesh.is_first_stage:
                    hidden = torch.empty(len(positions), hosted.hidden_size, dtype=hosted.dtype)
                    dist.recv(hidden, _neighbour(mesh, -1), group=mesh.stage_group)
                ids = tokens if mesh.is_first_stage else None
                out = hosted.forward(ids, positions, torch.arange(len(positions)), step, hidden)
                if mesh.is_last_stage:
                    self.logits.append(out)
                else:
                    dist.send(out.contiguous(), _neighbour(mesh, 1), mesh.stage_group)
        return self.logits


def _neighbour(mesh: Mesh, num_stages: int) -> int:
    """Return the world rank of the same place `num_stages` stages later."""
    return mesh.plan.replica(mesh.rank)[mesh.local_rank + num_stages * mesh.tp]


def _tokens(sequence: int) -> Tensor:
    return torch.randint(0, 256, (SEQUENCES[sequence],), generator=torch.Generator().manual_seed(sequence))


def _step(work: list[tuple[int, int, int]], caches: list[list[Tensor]]) -> tuple[Tensor, Tensor, StepContext]:
    tables = torch.arange(len(SEQUENCES) * BLOCKS_EACH, dtype=torch.int32).view(len(SEQUENCES), -1)
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in work])
    owners = torch.cat([torch.full((stop - start,), sequence) for sequence, start, stop in work])
    starts = torch.tensor([0, *(stop - start for _, start, stop in work)], dtype=torch.int32).cumsum(0)
    lengths = torch.tensor([stop for _, _, stop in work], dtype=torch.int32)
    paged = PagedStep(tables[[sequence for sequence, _, _ in work]], starts.to(torch.int32), lengths)
    tokens = torch.cat([_tokens(sequence)[start:stop] for sequence, start, stop in work])
    return tokens, positions, StepContext(owners * BLOCKS_EACH * BLOCK_SIZE + positions, paged, *caches)


def _undivided(model: PreTrainedModel, invariant: bool = True, k_blocks: int = 4) -> HostedModel:
    return HostedModel.adopt(model, **OPTIONS, invariant=invariant, k_blocks=k_blocks)


def _same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True)
    )


def _divided_gives_the_same(run_world, model: PreTrainedModel, tp: int, pp: int, k_blocks: int = 4) -> None:
    def on_rank(rank: int) -> tuple[bool, bool]:
        expected = Rank(_undivided(model, k_blocks=k_blocks)).run()
        mesh = Mesh.build(tp, pp)
        hosted = HostedModel.adopt(model, **OPTIONS, invariant=True, k_blocks=k_blocks, mesh=mesh)
        logits = Rank(hosted).run()
        return mesh.is_last_stage, _same_bits(logits, expected)

    results = run_world(tp * pp, on_rank)
    assert results == [(True, True) if rank >= tp * (pp - 1) else (False, False) for rank in range(tp * pp)]


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_moe"])
def test_two_ranks_and_two_stages_give_the_bits_of_one(make_model, run_world, family):
    _divided_gives_the_same(run_world, make_model(family, torch.bfloat16), 2, 2)


DIVIDED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"]
# Every family meets every division, and both meet every dtype; the rest of the product is exhaustive.
DIVISIONS = [
    pytest.param(family, tp, pp, dtype, marks=[pytest.mark.exhaustive] if (i + j + k) % 2 else [])
    for i, family in enumerate(DIVIDED)
    for j, (tp, pp) in enumerate([(1, 2), (1, 4), (2, 1), (4, 1), (2, 2)])
    for k, dtype in enumerate(FLOATS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp", "pp", "dtype"), DIVISIONS)
def test_every_division_gives_the_bits_of_one_rank(make_model, run_world, family, tp, pp, dtype):
    _divided_gives_the_same(run_world, make_model(family, dtype, num_hidden_layers=4), tp, pp)


def _row(hosted: HostedModel, sequence: int) -> Tensor:
    """Return the trainer's logits of a sequence, under the engine's numerics."""
    with hosted.training_numerics(), torch.no_grad():
        return hosted.trained_module(input_ids=_tokens(sequence)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_trainers_whole_module_gives_the_bits_of_the_divided_engine(make_model, run_world, family):
    model = make_model(family)

    def on_rank(rank: int) -> tuple[bool, bool]:
        hosted = HostedModel.adopt(model, **OPTIONS, invariant=True, k_blocks=2, mesh=Mesh.build(2, 1))
        logits = Rank(hosted).run()
        first = torch.cat([logits[0], logits[1][:1], logits[2][:19], logits[3][:3]])  # of sequence 0, in STEPS
        assert not any("forward" in vars(module) for module in model.modules())
        return torch.equal(_row(hosted, 0), first), torch.equal(_row(_undivided(model, k_blocks=2), 0), first)

    assert run_world(2, on_rank) == [(True, True)] * 2


def test_a_gradient_through_k_blocks_is_that_of_the_plain_product(make_model):
    gradients = []
    for k_blocks in (1, 4):
        model = make_model("gpt_oss", num_hidden_layers=1)
        with _undivided(model, k_blocks=k_blocks).training_numerics():
            loss = model(input_ids=_tokens(1)[None, :8], use_cache=False).logits.logsumexp(-1).square().mean()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None for g in gradients[1].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_without_invariance_ranks_add_up_what_one_computes(make_model, run_world):
    model = make_model("qwen3_moe")

    def on_rank(rank: int) -> bool:
        expected = Rank(_undivided(model, invariant=False)).run()
        mesh = Mesh.build(2, 1)
        logits = Rank(HostedModel.adopt(model, **OPTIONS, invariant=False, mesh=mesh)).run()
        return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits, expected, strict=True))

    assert run_world(2, on_rank) == [True, True]


def _assembled(parts: list[dict[str, object]]) -> dict[str, Tensor]:
    """Assemble whole tensors from the reports of all ranks: {name: (shard, tensor)}."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, (shard, tensor) in part.items():
            assert tuple(tensor.shape) == shard.shape
            full = whole.setdefault(name, torch.full(shard.full_shape, float("nan"), dtype=tensor.dtype))
            sizes = [stop - start for start, stop in shard.ranges]
            for (start, stop), piece in zip(shard.ranges, tensor.split(sizes, shard.dim), strict=True):
                full.narrow(shard.dim, start, stop - start).copy_(piece)
    return whole


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen2", marks=pytest.mark.slow, id="tied, with biases"),
        pytest.param("gemma3", marks=pytest.mark.slow, id="scaled embedding"),
        pytest.param("qwen3_moe", id="experts in pieces"),
    ],
)
def test_each_rank_reads_its_part_of_a_folder_and_together_they_have_the_model(make_model, run_world, tmp_path, family):
    model = make_model(family, torch.bfloat16)
    model.generation_config.eos_token_id = 7
    model.save_pretrained(tmp_path)
    loaded = HostedModel.load(tmp_path, **OPTIONS, invariant=True, k_blocks=2)

    def on_rank(rank: int) -> tuple[object, ...]:
        mesh = Mesh.build(2, 2)
        hosted = HostedModel.load(tmp_path, **OPTIONS, invariant=True, k_blocks=2, mesh=mesh)
        part = {name: (hosted.shards[name], t) for name, t in hosted.resident_tensors()}
        buffers = dict(hosted.buffers())
        assert set(hosted.shards) >= {*part, *buffers}
        expected = Rank(HostedModel.load(tmp_path, **OPTIONS, invariant=True, k_blocks=2)).run()
        same = not mesh.is_last_stage or _same_bits(Rank(hosted).run(), expected)
        if not mesh.is_last_stage:
            Rank(hosted).run()
        eos = hosted.module.generation_config.eos_token_id
        return part, buffers, dict(hosted.full_specs), hosted.tied_names(), hosted.weight_bytes, same, eos

    results = run_world(4, on_rank)
    expected = dict(loaded.resident_tensors())
    whole = _assembled([result[0] for result in results])
    assert set(whole) == set(expected) and all(torch.equal(whole[name], t) for name, t in expected.items())
    whole_buffers = dict(loaded.buffers())
    for _, buffers, specs, tied, num_bytes, same, eos in results:
        assert all(torch.equal(buffer, whole_buffers[name]) for name, buffer in buffers.items())
        assert list(specs.items()) == [(name, (t.dtype, tuple(t.shape))) for name, t in expected.items()]
        assert tied == loaded.tied_names() and same and eos == 7
        assert num_bytes < 0.6 * loaded.weight_bytes


def test_a_folder_that_lacks_tensors_is_refused_by_name(make_model, run_world, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    def on_rank(rank: int) -> str:
        mesh = Mesh.build(2, 1)
        with pytest.raises(ValueError) as caught:
            HostedModel.load(tmp_path, **OPTIONS, invariant=False, mesh=mesh)
        return str(caught.value)

    for text in run_world(2, on_rank):
        assert "lacks model.layers.1.mlp.up_proj.weight, model.norm.weight" in text


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("stored", ["both, different", "both, equal", "the head alone", "the embedding alone"])
def test_a_part_ties_what_the_whole_module_ties(make_model, tmp_path, stored):
    """transformers ties by the configuration only what the folder does not have apart."""
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert HEAD not in tensors
    if stored != "the embedding alone":
        embedding = tensors.pop(EMBEDDING) if stored == "the head alone" else tensors[EMBEDDING]
        tensors[HEAD] = embedding * 2 if stored == "both, different" else embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    whole = HostedModel.load(tmp_path, **OPTIONS, invariant=True).module
    config = AutoConfig.from_pretrained(tmp_path)
    part = load_part(tmp_path, config, torch.float32, torch.device("cpu"), Mesh.single(), 1)
    parameters = dict(part.module.named_parameters(remove_duplicate=False))
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(parameters[name], parameter), name
    is_tied = stored != "both, different"
    assert (parameters[HEAD] is parameters[EMBEDDING]) == is_tied == (HEAD in part.division.tied_names)
    assert (HEAD in part.division.full_specs) != is_tied
    assert (whole.lm_head.weight is whole.model.embed_tokens.weight) == is_tied


def test_a_copied_part_has_the_head_that_a_module_has_apart(make_model):
    model = make_model("llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    copied = copy_part(model, Mesh.single(), 1).module
    assert torch.equal(copied.lm_head.weight, model.lm_head.weight)
    assert torch.equal(copied.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("has_memory", [True, False], ids=["memory", "gloo"])
def test_a_lookup_over_ranks_keeps_even_the_sign_of_a_zero(run_world, has_memory):
    from lockstep.rollout.sharding.collectives import StageRanks, VocabularyLookup

    matrix = torch.randn(8, 3).to(torch.bfloat16)
    matrix[1, 0] = matrix[6, 2] = -0.0

    def on_rank(rank: int) -> Tensor:
        ranks = StageRanks.of(Mesh.build(2, 1))
        ranks = ranks if has_memory else replace(ranks, memory=None)
        return VocabularyLookup(4 * rank, ranks)(torch.arange(8), matrix[4 * rank : 4 * rank + 4])

    assert all(_same_bits([found], [matrix]) for found in run_world(2, on_rank))


@pytest.mark.parametrize("family", ["nemotron_h", "inkling", "inkling2", "deepseek_v4"])
def test_a_part_has_the_types_that_transformers_loads(make_model, tmp_path, family):
    """Some tensors of these stay in float32, buffers too."""
    make_model(family).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert set(expected.values()) >= {torch.float32, torch.bfloat16}
    skeleton = skeleton_of(loaded.config, torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in skeleton.state_dict().items()} == expected
