"""Episodes whose turns have images: their log-probabilities are those of one forward over all turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ProcessorMixin

pytest.importorskip("PIL.Image")
from PIL import Image

from lockstep.integration.grpo.engines.answers import Answer
from lockstep.integration.grpo.environments.chat import EpisodeChat
from lockstep.integration.grpo.environments.session import Session, with_images
from lockstep.integration.grpo.environments.turns import Turns
from lockstep.integration.grpo.results.samples import sample_row
from lockstep.integration.grpo.rewards.score import Score
from lockstep.integration.grpo.settings.sections import DataSettings
from lockstep.integration.grpo.tasks.picture_reader import PictureReader
from lockstep.integration.grpo.tasks.problems import Problem
from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.image_inputs import banned_tokens
from lockstep.integration.replay.beside import others_beside
from lockstep.integration.service import RolloutService
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.optional_packages import needs_transformers
from lockstep.tests.support.images import models

ENGINE = EngineConfig(kv_cache="128 blocks", max_num_seqs=8, receipts="tokens")


@pytest.fixture(autouse=True)
def _modules_that_take_features_of_images() -> None:
    needs_transformers(5, 23)


def picture(shade: int, size: tuple[int, int] = (32, 32)) -> Any:
    return Image.new("RGB", size, (shade, 255 - shade, 90))


class Talk:
    """A service, and the sessions of its episodes."""

    def __init__(self, kind: str, folder: Path) -> None:
        model, self.processor = getattr(models, kind)()
        self.service = RolloutService(Engine(model, ENGINE, tokenizer=self.processor.tokenizer))
        self.service.commit_in_place("0", source=model.named_parameters())
        self.processor.tokenizer.chat_template = self.processor.chat_template
        if kind == "llava":
            self.processor.save_pretrained(folder)
        self.chat = EpisodeChat(DataSettings(), self.processor.tokenizer, PictureReader(str(folder)))

    def play(self, environment: Callable[..., Any], seed: int = 3, turns: Turns | None = None) -> Any:
        engine = self.service.engine
        params = SamplingParams(max_new_tokens=6, logit_bias=banned_tokens(engine.model.module))
        turns = turns or Turns(engine)
        session = Session(turns, self.chat, params, seed, engine.max_model_len)
        with self.service.rollout():
            return asyncio.run(environment(session)), turns

    def logprobs(self, samples: list[Sample]) -> list[float]:
        hosted = self.service.engine.model
        packed = pack(samples, hosted.device, hosted.module)
        with hosted.training_numerics(), torch.no_grad():
            logits = packed.kept(hosted.trained_module(**packed.model_inputs()).logits)
            return selected_logprobs(logits, packed.targets, 1.0).tolist()


def sample_of(episode: Any) -> Sample:
    [found] = Answer(episode.as_completion(0), Score(1.0), episode).samples(0, 1.0, counts=True)
    return found


def shown(text: str, *pictures: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": one} for one in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def two_pictures(session: Session) -> Any:
    await session.turn(shown("the name", picture(10)))
    await session.turn("and")
    await session.turn(shown("the value", picture(200), picture(90)), max_new_tokens=4)
    return session.episode(1.0)


async def text_alone(session: Session) -> Any:
    await session.turn("the name")
    return session.episode(0.0)


def test_turns_with_pictures_have_the_logprobs_of_one_forward(tmp_path):
    talk = Talk("llava", tmp_path)
    (episode, _), (plain, _) = talk.play(two_pictures), talk.play(text_alone)
    assert [len(one.inputs) for one in episode.images] == [1, 3] and plain.images == ()
    samples = [sample_of(one) for one in (episode, plain, episode)]
    assert talk.logprobs(samples) == [logprob for one in samples for logprob in one.logprobs]
    [token] = banned_tokens(talk.service.engine.model.module)
    assert episode.token_ids.count(token) == 2 * 16, "of the pictures of later turns"


def test_a_turn_takes_the_kv_of_the_turns_before_and_encodes_its_own_pictures_alone(tmp_path):
    talk = Talk("llava", tmp_path)
    encoder, engine = talk.service.engine.model.images, talk.service.engine
    own, encoded, sizes = encoder.keywords, [], []

    def watched(images: Any, token_ids: Any) -> Any:
        encoded.extend((len(part.images.ends), part.index) for part in images.parts)
        return own(images, token_ids)

    async def environment(session: Session) -> Any:
        for new in (shown("the name", picture(10)), "and", shown("the value", picture(200), picture(90))):
            sizes.append(session.num_tokens)
            await session.turn(new)
        return session.episode(1.0)

    encoder.keywords = watched
    episode, _ = talk.play(environment)
    size = engine.config.block_size
    assert episode.num_cached_tokens == sum((num - 1) // size * size for num in sizes[1:]) > 32
    assert set(encoded) == {(1, 0), (3, 1), (3, 2)}


def test_receipts_of_turns_are_proven_with_the_images_of_each(tmp_path):
    talk = Talk("llava", tmp_path)
    episode, _ = talk.play(two_pictures)
    prompts = [{name: torch.cat([one[name] for one in its.inputs]) for name in its.inputs[0]} for its in episode.images]
    report = talk.service.replay(list(episode.receipts), prompts=prompts)
    assert [verdict.status for verdict in report.verdicts] == ["equal"] * 3, report.lines()
    row = sample_row(Problem("a", "b"), episode.as_completion(0), Score(1.0), 0.0, episode)
    assert others_beside([json.loads(json.dumps(row))]) == {}


def given(processor: ProcessorMixin, text: str, *pictures: Any) -> dict[str, Any]:
    return dict(processor(text=[text], images=list(pictures), return_tensors="pt"))


def test_what_a_processor_gives_is_a_turn_with_positions_of_three_parts(tmp_path):
    talk = Talk("qwen2_5_vl", tmp_path)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"

    async def environment(session: Session) -> Any:
        await session.turn(given(talk.processor, f"{mark} the name", picture(10, (32, 16))))
        await session.turn([5, 6, 7])
        await session.turn(given(talk.processor, f"and {mark} or {mark}", picture(90), picture(30, (16, 48))))
        return session.episode(1.0)

    (episode, _), (plain, _) = talk.play(environment), talk.play(text_alone)
    samples = [sample_of(plain), sample_of(episode)]
    assert [len(one.inputs) for one in episode.images] == [1, 3]
    assert talk.logprobs(samples) == [logprob for one in samples for logprob in one.logprobs]


def test_the_bans_of_a_job_stay_where_a_turn_has_a_bias_of_its_own(tmp_path):
    talk = Talk("llava", tmp_path)
    seen: list[Any] = []

    class Noted(Turns):
        async def __call__(self, prompt_ids: Any, params: Any, images: Any = ()) -> Any:
            seen.append(params.logit_bias)
            return await super().__call__(prompt_ids, params, images)

    async def environment(session: Session) -> Any:
        await session.turn("the name", logit_bias={5: 2.0})
        await session.turn("and", logit_bias=None)
        return session.episode(1.0)

    talk.play(environment, turns=Noted(talk.service.engine))
    [(token, bias)] = banned_tokens(talk.service.engine.model.module).items()
    assert seen == [{5: 2.0, token: bias}, {token: bias}]


def test_a_turn_of_another_play_is_renewed_with_the_same_pictures_alone(tmp_path):
    talk = Talk("llava", tmp_path)
    _, first = talk.play(two_pictures)
    engine = talk.service.engine
    same, other = [*first.asked], [*first.asked]
    assert len({one.images for one in first.asked}) == 2 and all(one.images for one in first.asked)
    talk.play(two_pictures, turns=Turns(engine, same))
    verified = engine.metrics.num_verified_tokens
    assert verified > 0

    async def others(session: Session) -> Any:
        await session.turn(shown("the name", picture(11)))
        return session.episode(1.0)

    talk.play(others, turns=Turns(engine, other))
    assert engine.metrics.num_verified_tokens == verified


def test_pictures_that_cannot_be_taken_are_named(tmp_path):
    talk = Talk("llava", tmp_path)

    async def ask(session: Session, *new: Any) -> Any:
        for one in new:
            await session.turn(one)

    for new, message in [
        ([shown("a", str(tmp_path / "no.png"))], "no.png is no picture that can be read"),
        ([{"role": "user", "content": [{"type": "image"}]}], 'a part of the type "image" needs the picture'),
    ]:
        with pytest.raises(ValueError, match=message):
            talk.play(lambda session, its=new: ask(session, *its))
    with pytest.raises(ValueError, match="images of a turn have image_grid_thw, and those before pixel_values"):
        with_images({"pixel_values": torch.zeros(1)}, {"image_grid_thw": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensors of images differ in their dimensions"):
        with_images({"pixel_values": torch.zeros(1, 2)}, {"pixel_values": torch.zeros(1, 2, 3)})
    found = with_images({"pixel_values": torch.ones(1, 2, 3)}, {"pixel_values": torch.ones(2, 3, 1)})["pixel_values"]
    assert found.shape == (3, 3, 3) and found[0, 2:].sum() == found[1:, :, 1:].sum() == 0 and found.sum() == 12
