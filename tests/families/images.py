"""One class of the sweep with images: its answers are compared with the module's own forward and with its trainer's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lockstep.integration.grpo.training.packing import Sample, pack
from lockstep.integration.image_inputs import joined
from lockstep.kernels.sampling.logprobs import selected_logprobs
from lockstep.rollout.completion import Completion
from lockstep.rollout.config import EngineConfig
from lockstep.rollout.engine import Engine
from lockstep.rollout.media.encoder import NoFeatures, as_taken
from lockstep.rollout.media.reader import image_token, why_no_images
from lockstep.rollout.sampling_params import SamplingParams
from lockstep.tests.families.compare import NUM_NEW, TOLERANCE, Differs, Progress, random_model
from lockstep.tests.families.configs import EXCEPTIONS, USUAL_TOKENS

WORDS = ([13, 17, 90], [27, 28, 40, 41, 42], [55] * 20)
CHUNKS = {"gemma4": 16, "gemma4_unified": 64}  # rows: as many as the tokens of an image that see each other both ways
SIZES = (((4, 8), (8, 4)), ((8, 8),))  # of the images of two prompts, in patches


# Values of configurations with which images of a few patches fit: by name, in any part of a configuration.
SMALL = {
    "patch_size": 8,
    "window_size": 64,
    "mm_tokens_per_image": 4,
    "pooling_kernel_size": 2,
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
    "vision_feature_layers": [-2, -3],
    "scale_factor": 2,
}


class NoImages(Exception):
    """A class for which no images can be made here."""


def compare_images(kind: str, model_type: str, progress: Progress) -> list[str]:
    """Compare one class with images in float32 and bfloat16. Raises Differs, and what its parts raise."""
    remarks: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        progress.part = f"build {dtype}"
        model = random_model("vision", model_type, dtype, _with_small_images)
        progress.part = f"host {dtype}"
        if (why := why_no_images(model)) is not None:
            raise ValueError(why)
        chunk = CHUNKS.get(model_type, 13)
        engine = Engine(model, EngineConfig(kv_cache="64 blocks", max_num_seqs=4, chunked_prefill_size=chunk))
        progress.part = f"build {dtype}"
        try:
            prompts = [_prompt(engine, sizes) for sizes in SIZES]
        except NoFeatures:
            progress.part = f"host {dtype}"
            raise
        progress.part = f"host {dtype}"
        engine.generate(prompts[:1], SamplingParams(max_new_tokens=1))  # the check of images
        progress.part = f"compare {dtype}"
        _compare(engine, model, prompts)
        engine.close()
    return remarks


def _with_small_images(config: PretrainedConfig) -> PretrainedConfig:
    """Make a configuration again with SMALL."""
    parts = {name: _with_small_images(one) for name, one in vars(config).items() if isinstance(one, PretrainedConfig)}
    known = {field.name for field in dataclasses.fields(config)}
    values = {name: vars(config)[name] for name in known if name in vars(config)}
    others = {name: one for name, one in EXCEPTIONS.get(config.model_type, {}).items() if name not in known}
    is_in_pixels = "fullatt_block_indexes" in known  # other windows are in patches, or of text
    small = {name: one for name, one in SMALL.items() if name in known and (is_in_pixels or name != "window_size")}
    small = {name: one for name, one in small.items() if name not in EXCEPTIONS.get(config.model_type, {})}
    if isinstance(values.get("patch_size"), list | tuple):
        del small["patch_size"]
    return type(config)(**{**values, **others, **parts, **small}) if small or parts else config


def _prompt(engine: Engine, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return a prompt with random images. Raises NoImages where the class takes others than are known here."""
    model, encoder = engine.model.module, engine.model.images
    assert encoder is not None
    generator = torch.Generator().manual_seed(len(sizes))
    ids: list[int] = []
    parts: list[dict[str, Tensor]] = []
    token = image_token(model)
    assert token is not None
    for size, words in zip(sizes, WORDS, strict=False):
        errors = []
        for given in _candidates(model, size, generator):
            try:
                with engine.model.rollout_phase():
                    num = encoder.count(given)
                break
            except NoFeatures:
                raise
            except (ValueError, RuntimeError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
                errors.append(f"{type(error).__name__}: {error}")
        else:
            raise NoImages("; ".join(errors))
        parts.append(given)
        begin = getattr(model.config, "vision_start_token_id", None)
        ids += [*([] if begin is None else [begin]), *[token] * num, *words]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {"input_ids": torch.tensor([ids]), **joined}


def _candidates(
    model: PreTrainedModel, patches: tuple[int, int], generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a random image in the forms that processors give. patches: rows and columns of them."""
    taken = inspect.signature(model.base_model.get_image_features).parameters
    vision = getattr(model.config, "vision_config", None)
    channels = next((n for name in ("in_channels", "in_chans", "num_channels") if (n := getattr(vision, name, 0))), 3)
    size, patch = getattr(vision, "image_size", None) or 32, getattr(vision, "patch_size", None) or 8

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    if "image_grid_thw" in taken:
        grid = {"image_grid_thw": torch.tensor([[1, *patches]])}
        if "image_merge_sizes" in taken:
            grid["image_merge_sizes"] = torch.tensor([2])
        num = patches[0] * patches[1]
        for frames in dict.fromkeys((getattr(vision, "temporal_patch_size", 1), 1, 2)):
            yield {"pixel_values": noise(num, channels * frames * patch**2), **grid}
        yield {"pixel_values": noise(num, channels, patch, patch), **grid}
        return
    if "image_position_ids" in taken or "spatial_shapes" in taken:
        yield from _padded_patches(patches, channels * getattr(vision, "model_patch_size", patch) ** 2, taken, noise)
        return
    rows, columns = (size, size) if isinstance(size, int) else size
    if "high_res_pixel_values" in taken:
        high = model.config.high_res_vision_config.image_size
        yield {"pixel_values": noise(1, 3, rows, columns), "high_res_pixel_values": noise(1, 3, high, high)}
    if "pixel_attention_mask" in taken:
        yield from _padded_pixels(rows, columns, patch, noise)
    sizes = {"image_sizes": torch.tensor([[rows, columns]])} if "image_sizes" in taken else {}
    if sizes:  # tiles of an image, with the whole of it; or a part of a canvas
        whole = torch.tensor([[2 * rows, 2 * columns]])
        yield {"pixel_values": noise(1, 5, channels, rows, columns), "image_sizes": whole}
        part = torch.tensor([[patch * patches[0], patch * patches[1]]])
        yield {"pixel_values": noise(1, channels, 8 * patch, 8 * patch), "image_sizes": part}
    yield {"pixel_values": noise(1, 2, channels, rows, columns), **sizes}
    yield {"pixel_values": noise(1, channels, rows, columns)}


def _padded_patches(
    patches: tuple[int, int], width: int, taken: Collection[str], noise: Callable[..., Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield the patches of an image in a row, padded to 64 of `width` numbers, with their places or their number."""
    rows, columns = patches
    num = rows * columns
    pixels = noise(1, 64, width)
    pixels[:, num:] = 0
    if "spatial_shapes" in taken:
        mask = (torch.arange(64) < num).long()[None]
        yield {"pixel_values": pixels, "spatial_shapes": torch.tensor([[rows, columns]]), "pixel_attention_mask": mask}
        return
    places = torch.full((1, 64, 2), -1)
    places[0, :num, 0], places[0, :num, 1] = torch.arange(num) % columns, torch.arange(num) // columns
    yield {"pixel_values": pixels, "image_position_ids": places}


def _padded_pixels(rows: int, columns: int, patch: int, noise: Callable[..., Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield two images in the place of one, the second padded by a column of patches; and two tiles with padding."""
    mask = torch.ones(1, 2, rows, columns, dtype=torch.int64)
    mask[0, 1, :, columns - patch :] = 0
    yield {"pixel_values": noise(1, 2, 3, rows, columns) * mask[:, :, None], "pixel_attention_mask": mask}
    yield {
        "pixel_values": noise(1, 3, 3, rows, columns),
        "pixel_attention_mask": torch.tensor([[True, True, False]]),
    }


def _compare(engine: Engine, model: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]]) -> None:
    for seed in range(5, 60):  # a trainer's forward refuses an answer with a token of images, or of audio
        params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.7, sampling_seed=seed)
        sampled = engine.generate(list(prompts), params)
        if all(id < USUAL_TOKENS.stop for completion in sampled for id in completion.token_ids):
            break
    if engine.model.dtype is torch.float32:
        for prompt, completion in zip(prompts, sampled, strict=True):
            [own] = _logprobs(model, [prompt], [completion], 0.7)
            off = (own - torch.tensor(completion.logprobs)).abs().max()
            if not off <= TOLERANCE:
                raise Differs(f"log-probabilities, off by {off:.2g}, are not the module's own")
    with engine.model.training_numerics():
        for layout, groups in (("whole", [[0], [1]]), ("padded", [[0, 1]])):
            for group in groups:
                completions = [sampled[index] for index in group]
                found = _logprobs(model, [prompts[index] for index in group], completions, 0.7)
                gap = max(
                    float((row - torch.tensor(c.logprobs)).abs().max())
                    for row, c in zip(found, completions, strict=True)
                )
                if gap:
                    raise Differs(f"logprob_gap {gap:.2g} ({layout})")
    _compare_packed(engine, sampled)
    _compare_turn(engine, model, prompts)


def _compare_turn(engine: Engine, model: PreTrainedModel, prompts: Sequence[Mapping[str, Tensor]]) -> None:
    """Compare the answer to a next turn, which has one more image and takes cached KV, with the trainer's forward."""
    more, before = prompts
    banned = dict.fromkeys(range(USUAL_TOKENS.stop, engine.model.vocab_size), -100.0)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.7, sampling_seed=5, logit_bias=banned)
    [first] = engine.generate([before], params)
    ids = torch.cat([torch.tensor([first.prompt_ids + first.token_ids]), more["input_ids"]], dim=1)
    later = {name: joined([before[name], more[name]]) for name in before.keys() - {"input_ids"}} | {"input_ids": ids}
    [second] = engine.generate([later], params)
    with engine.model.training_numerics():
        [found] = _logprobs(model, [later], [second], 0.7)
    if gap := float((found - torch.tensor(second.logprobs)).abs().max()):
        raise Differs(f"logprob_gap {gap:.2g} (a next turn, {second.num_cached_tokens} tokens of it cached)")
    num_known = len(first.prompt_ids) + len(first.token_ids)
    if second.num_cached_tokens + 2 * engine.config.block_size <= num_known:
        raise Differs(f"a next turn takes {second.num_cached_tokens} cached tokens of {num_known}")


def _compare_packed(engine: Engine, sampled: Sequence[Completion]) -> None:
    """Compare answers without the token of images with the forward of the job's trainer over one packed row."""
    token, hosted = image_token(engine.model.module), engine.model
    samples = [
        Sample(c.prompt_ids, c.token_ids, c.logprobs, 1.0, images=c.drawn_with.images)
        for c in sampled
        if token not in c.token_ids and c.drawn_with is not None
    ]
    packed = pack(samples, hosted.device, hosted.module)
    with hosted.training_numerics(), torch.no_grad():
        logits = packed.kept(hosted.trained_module(**packed.model_inputs()).logits)
        found = selected_logprobs(logits, packed.targets, 0.7)
    if gap := float((found - packed.logprobs).abs().max()):
        raise Differs(f"logprob_gap {gap:.2g} (packed)")


def _logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Mapping[str, Tensor]],
    completions: Sequence[Completion],
    temperature: float,
) -> list[Tensor]:
    """Return the log-probabilities of completions in the module's forward over all of them, padded on the right."""
    rows = [torch.tensor(c.prompt_ids + c.token_ids) for c in completions]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    names = prompts[0].keys() - {"input_ids"}
    given |= as_taken({name: torch.cat([prompt[name] for prompt in prompts]) for name in names}, model)
    taken = inspect.signature(type(model).forward).parameters
    types = (torch.eq(ids, image_token(model) or 0) & mask.bool()).int()
    given |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    with torch.no_grad():
        logits = model(**given).logits
    found = []
    for row, completion in zip(logits, completions, strict=True):
        first = completion.num_prompt_tokens - 1
        own = row[first : first + len(completion.token_ids)].float()
        found.append(selected_logprobs(own, torch.tensor(completion.token_ids), temperature))
    return found
