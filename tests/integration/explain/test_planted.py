"""Changes of one unit in the last place, drawn at random, are found in the layer and the operation that they are in."""

import copy
import random

import pytest
import torch

from lockstep.integration.explain.comparison import compare
from lockstep.integration.explain.recording import Recording
from lockstep.integration.explain.runs import run_way
from lockstep.integration.explain.sequence import TokenSequence
from lockstep.integration.explain.ways import parse_way
from lockstep.rollout.check.forwards import watched
from lockstep.rollout.model.hosted_model import HostedModel
from lockstep.tests.support.explain.planted import Plant, draw, planted
from lockstep.tests.support.random_models import random_model

WAYS = ("decode", "prefill", "trainer", "chunked", "speculation")
NUM_PLANTS = 40


@pytest.fixture(scope="module")
def sequence() -> TokenSequence:
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    return TokenSequence(tuple(ids[:28]), tuple(ids[28:]))


def activations(model, sequence: TokenSequence) -> list[torch.Tensor]:
    """Run the module by itself and return its modules' inputs and results: the measure of what a change changes."""
    hosted = HostedModel.adopt(model, dtype=None, device=None, invariant=True)
    with hosted.training_numerics(), torch.no_grad(), watched(model) as seen:
        rows = torch.arange(len(sequence.prompt_ids) - 1, sequence.num_rows)
        model(torch.tensor([sequence.ids[:-1]]), use_cache=False, logits_to_keep=rows)
    return [one.tensor for one in seen]


def changes(model, plant: Plant, sequence: TokenSequence, before: list[torch.Tensor]) -> bool:
    """Return whether the change changes an activation, apart from the changed one itself."""
    with planted(model, plant):
        after = activations(model, sequence)
    return any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def located(model, plant: Plant, clean: Recording, way: str, sequence: TokenSequence) -> tuple[object, object]:
    """Return the place of the change, and where it was found."""
    with planted(model, plant):
        found = compare(clean, run_way(parse_way(way), sequence, model)).first
    _, _, inside = plant.module.partition("layers.")
    layer, _, name = inside.partition(".")
    place = (int(layer), name, plant.what) if inside else (None, plant.module, plant.what)
    if plant.parameter and plant.module == "model.embed_tokens":
        weight = model.get_input_embeddings().weight
        token = plant.element % weight.numel() // weight.shape[1]
        if token not in sequence.ids[:-1]:  # of a tied weight: the last product alone reads it
            place = (None, "lm_head", plant.what)
    return place, found and tuple(found.operation)


def plants_that_change(model, sequence: TokenSequence, num: int, seed: int) -> list[Plant]:
    random_numbers, before = random.Random(seed), activations(model, sequence)
    found: list[Plant] = []
    while len(found) < num:
        plant = draw(model, sequence.num_rows, random_numbers)
        if changes(model, plant, sequence, before):
            found.append(plant)
    return found


def all_located(family: str, sequence: TokenSequence, num: int, seed: int) -> list[Plant]:
    """Return the planted changes that were found elsewhere than where they are, with what was found."""
    model = random_model(family, num_hidden_layers=4)
    clean = run_way(parse_way("decode"), sequence, copy.deepcopy(model))
    elsewhere = []
    plants = plants_that_change(model, sequence, num, seed)
    for index, plant in enumerate(plants):
        place, found = located(model, plant, clean, WAYS[index % len(WAYS)], sequence)
        if place != found:
            elsewhere.append((plant, found))
    assert len({(plant.module, plant.kind) for plant in plants}) > num // 2
    return elsewhere


def test_planted_changes_are_located_to_layer_and_operation(sequence):
    assert all_located("qwen3", sequence, num=5, seed=1) == []


@pytest.mark.slow
def test_forty_planted_changes_are_located_to_layer_and_operation(sequence):
    assert all_located("qwen3", sequence, num=NUM_PLANTS, seed=2) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gemma3"])
def test_planted_changes_are_located_in_other_families(family, sequence):
    assert all_located(family, sequence, num=NUM_PLANTS, seed=3) == []
