"""Data and answers in JSON, as SDKs before 0.30 send and read them; see `messages` for the same in Protocol Buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..training.data import BadInput, Datum
from .bodies import DatumBody, TensorBody, csr_places_of, numbers_of, tokens_of
from .messages import NO_LOGPROB, DenseRoom, SampleAnswer, check_dimensions, dense_of


def data_of(bodies: Sequence[DatumBody]) -> list[Datum]:
    """Return the data of a pass. Raises BadInput naming the datum."""
    found, room = [], DenseRoom()
    for index, body in enumerate(bodies):
        try:
            tokens = np.array(tokens_of(body.model_input, "model_input"), np.int64)
            inputs = {name: _array(name, its, len(tokens), room) for name, its in body.loss_fn_inputs.items()}
            found.append(Datum(tokens, inputs))
        except (ValueError, OverflowError) as error:
            raise BadInput(f"data[{index}]: {error}") from None
    return found


def _array(name: str, body: TensorBody, num_tokens: int, room: DenseRoom) -> np.ndarray:
    values = numbers_of(body, name)
    if (places := csr_places_of(body, name)) is not None:
        room.take(body.shape, num_tokens)
        return dense_of(values, *places, body.shape, 0)
    if body.shape is None:
        return values
    check_dimensions(body.shape)
    if min(body.shape, default=0) < 0 or values.size != math.prod(body.shape):
        raise BadInput(f"{name} has {values.size} numbers, and the shape {body.shape!s:.100}")
    return values.reshape(body.shape)


def pass_values(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> dict[str, object]:
    """Return the output of a pass. outputs: float32 arrays by name, of each datum."""
    return {
        "loss_fn_output_type": "ArrayRecord", "metrics": dict(metrics),
        "loss_fn_outputs": [{name: _tensor(array) for name, array in one.items()} for one in outputs],
    }  # fmt: skip


def sample_values(answer: SampleAnswer) -> dict[str, object]:
    """Return the answer to a request for samples."""
    sequences = [
        {
            "stop_reason": "stop" if one.has_stopped else "length", "tokens": list(one.token_ids),
            "logprobs": list(one.logprobs),
        }
        for one in answer.sequences
    ]  # fmt: skip
    logprobs, top = answer.prompt_logprobs, answer.prompt_top
    return {
        "type": "sample", "sequences": sequences,
        "prompt_logprobs": None if logprobs is None else [None if math.isnan(own) else float(own) for own in logprobs],
        "topk_prompt_logprobs": None if top is None else [_entries(row) for row in top],
    }  # fmt: skip


def _tensor(array: np.ndarray) -> dict[str, object]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def _entries(row: np.ndarray) -> list[tuple[int, float]] | None:
    return [(int(own["id"]), float(own["logprob"])) for own in row if own["logprob"] != NO_LOGPROB] or None
