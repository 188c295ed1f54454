"""The reading of images by the engine, which may have to run the model: only while no trainer uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TypeVar

from ....rollout.control.desk.intake import CheckedPrompt, Prompt
from ....rollout.engine import Engine
from ....rollout.errors import DeadlineExceeded, MemoryReleased, SamplingRefused
from ....rollout.giving_way import others_compute
from ....rollout.media.images import Images, PromptWithImages
from ..edge.errors import BadField, HttpError
from ..edge.threads import run_giving_way
from .intake import ProcessedPrompt
from .kept import Made, OpenImages
from .pictures import SentPicture

_LOOK_S = 1.0  # between two looks at whether the client is still there
T = TypeVar("T")


def read_images(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    share: Callable[[list[Made]], None],
    check_here: Callable[[], None],
    is_aborted: Callable[[], bool],
) -> list[Prompt]:
    """Return prompts for the engine, each processed one with its images as the engine reads them.

    Sizes of images that the engine has not met need a run of the model: that waits for a rollout phase, as a request's
    steps do, and no longer once the request is aborted. share: counts what was made, and refuses too much. check_here:
    raises where the client has left meanwhile. Raises BadField that names the field of the images, and HttpError 503
    where no step may run until the weights are written.
    """
    # By identity: the samples of a prompt that go on here share it.
    processed = {id(one): one for one in prompts if isinstance(one, ProcessedPrompt)}
    share([one.made for one in processed.values()])
    read: dict[int, Prompt] = {}

    def computing() -> AbstractContextManager[None]:
        return _computing(engine, check_here, is_aborted)

    for key, prompt in processed.items():
        try:
            found = engine.requests.read_images(prompt.made.inputs, computing)
        except _Aborted:
            return unread(prompts)
        except ValueError as error:
            raise BadField(prompt.field, str(error)) from None
        except (MemoryReleased, SamplingRefused) as error:
            message = f"images of this size are new here and need the model, which does not run: {error}"
            raise HttpError(503, message, headers={"Retry-After": "1"}) from None
        if isinstance(found, PromptWithImages):
            _check_ranges(prompt, found.images)
        read[key] = found
    return [read.get(id(prompt), prompt) for prompt in prompts]


def _check_ranges(prompt: ProcessedPrompt, images: Images) -> None:
    """Check that each image has its tokens where its request says, if it does. Raises BadField."""
    begin = 0
    for index, ((first, end), stop) in enumerate(zip(prompt.made.ranges, images.ends, strict=False)):
        tokens = images.tokens[begin:stop]
        if tokens[0] < first or tokens[-1] >= end:
            what = f"image {index} has {len(tokens)} features, and tokens {tokens[0]} to {tokens[-1]}, not {first} to "
            raise BadField(prompt.field, f"{what}{end - 1}")
        begin = stop


def unread(prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Return the prompts of a request that is aborted, those with images as their tokens alone: none of it runs."""
    return [CheckedPrompt(list(one)) if isinstance(one, ProcessedPrompt) else one for one in prompts]


class _Aborted(Exception):
    """The request was aborted while its images waited for the model."""


@contextmanager
def _computing(engine: Engine, check_here: Callable[[], None], is_aborted: Callable[[], bool]) -> Iterator[None]:
    """Wait until the model may run beside the steps, and keep it so. Raises _Aborted."""
    with others_compute(), ExitStack() as stack:
        while True:
            check_here()
            if is_aborted():
                raise _Aborted
            with suppress(DeadlineExceeded):
                stack.enter_context(engine.model.borrowed("a prompt with images", _LOOK_S))
                break
        yield


async def made_in_thread(
    make: Callable[[], T], pictures: Sequence[SentPicture], threads: Executor, opened: OpenImages
) -> T:
    """Return `make()`, which decodes these images, from a thread for that. opened: counts them meanwhile. Raises
    Overloaded, and its errors."""
    loop, held = asyncio.get_running_loop(), object()
    opened.take(held, sum(picture.num_bytes for picture in pictures))
    try:
        return await loop.run_in_executor(threads, run_giving_way, loop, make)
    finally:
        opened.release(held)
