"""The bodies of requests as the SDK sends them in JSON. An unknown field is refused, since it may ask for anything.

Source: the request types of the SDK (tinker 0.38).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from ...http.edge.bodies import Body
from ..training.data import BadInput

Id = Annotated[str, Field(min_length=1, max_length=200)]
Seq = Annotated[int, Field(ge=0, lt=2**62)]
Metadata = dict[str, Any]
_MAX_TOP = 1024


class Strict(Body):
    """A body whose fields are all known."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=False, protected_namespaces=())

    type: str | None = None  # the name of the request, which its path has too


class SessionBody(Strict):
    """Create a session."""

    tags: list[str] | None = None
    user_metadata: Metadata | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(Strict):
    """Keep a session alive."""

    session_id: Id


class LoraBody(Strict):
    """The shape of an adapter."""

    rank: int
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Strict):
    """The optimizer of a model."""

    type: str = "adamw"
    version: int | None = None


class CreateModelBody(Strict):
    """Create a model."""

    session_id: Id
    model_seq_id: Seq
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class ModelBody(Strict):
    """Name a model."""

    model_id: Id


class AdamBody(Strict):
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepBody(Strict):
    """Update a model's weights."""

    model_id: Id
    seq_id: Seq | None = None
    adam_params: AdamBody | None = None
    optimizer_params: Metadata | None = None


class SaveBody(Strict):
    """Save a model's weights: for training, for a sampler, or for elsewhere."""

    model_id: Id
    seq_id: Seq | None = None
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: list[str] | None = None


class LoadBody(Strict):
    """Load weights into a model, or create one from them."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None


class SamplingSessionBody(Strict):
    """Create a sampler."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: str | None = None
    model_path: str | None = None


class SamplerBody(Strict):
    """Name a sampler."""

    sampling_session_id: Id


class FutureBody(Strict):
    """Ask for the answer to a request."""

    request_id: Id
    allow_metadata_only: bool = False


class InputBody(Strict):
    """A prompt."""

    chunks: list[dict[str, Any]]


class TensorBody(Strict):
    """A tensor in JSON."""

    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class DatumBody(Strict):
    """One sequence with what its loss reads."""

    model_input: InputBody
    loss_fn_inputs: dict[str, TensorBody]


class PassInput(Strict):
    """The data of a pass, and their loss."""

    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class PassBody(Strict):
    """Run data forward, or forward and backward, as SDKs before 0.30 ask for it."""

    model_id: Id
    seq_id: Seq | None = None
    forward_input: PassInput | None = None
    forward_backward_input: PassInput | None = None


class PathBody(Strict):
    """Name a checkpoint."""

    tinker_path: str


class TtlBody(Strict):
    """Set the time until a checkpoint expires."""

    ttl_seconds: int | None = None


class ParamsBody(Strict):
    """Settings of samples."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(Strict):
    """Draw samples."""

    prompt: InputBody
    sampling_params: ParamsBody
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_session_id: Id | None = None
    seq_id: Seq | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] = 0
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


def tokens_of(body: InputBody, name: str) -> list[int]:
    """Return the tokens of a prompt. Raises BadInput naming a chunk that has none."""
    found: list[int] = []
    for index, chunk in enumerate(body.chunks):
        kind = chunk.get("type", "encoded_text" if "tokens" in chunk else None)  # older SDKs leave it out
        if kind != "encoded_text":
            raise BadInput(f"{name}.chunks[{index}]: chunks of type {kind!r:.50} are not taken, only encoded_text")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or any(type(one) is not int for one in tokens):
            raise BadInput(f"{name}.chunks[{index}]: tokens must be a list of whole numbers")
        found += tokens
    return found


def numbers_of(body: TensorBody, name: str) -> np.ndarray:
    """Return the numbers of a tensor, flat. Raises BadInput for numbers that its dtype does not have."""
    try:
        found = np.asarray(body.data, np.float64 if body.dtype == "float32" else None)
    except OverflowError:
        raise BadInput(f"{name} has numbers beyond {body.dtype}") from None
    if body.dtype == "int64" and found.size and found.dtype != np.int64:
        raise BadInput(f"{name} must be whole numbers of int64")
    return found.astype(np.int64 if body.dtype == "int64" else np.float32)


def csr_places_of(body: TensorBody, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return where each row of a tensor in CSR form begins, with the end, and the columns of its numbers; None: it is
    dense. Raises BadInput for numbers that int64 does not have."""
    if body.sparse_crow_indices is None or body.sparse_col_indices is None:
        return None
    try:
        return np.array(body.sparse_crow_indices, np.int64), np.array(body.sparse_col_indices, np.int64)
    except OverflowError:
        raise BadInput(f"{name} has places beyond int64") from None
