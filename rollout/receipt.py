"""Receipts of samples: all that their bits follow from, as small JSON objects: docs/guides/receipts.md.

The canonical form has sorted keys and no spaces, and no floating-point numbers: these are written as the integers of
their bits. So two programs that hold equal receipts hold equal bytes, and equal hashes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..kernels.linear.linear import native_path
from ..kernels.machine import native
from ..kernels.sampling import cpp as sampling
from ..kernels.sampling.definition import DRAW_DEFINITION
from .model.hosted_model import HostedModel
from .sampling_params import SamplingParams

FORMAT = 1
HASH = "sha256"  # the key of a receipt's own hash, which covers all others
LISTS = ("prompt", "output", "logprobs")  # the keys of lists of integers, or of their digests
# The engine's settings that a constrained answer follows from, as its receipt, a proof and a replay name them.
GRAMMAR_SETTINGS = ("grammar_any_whitespace", "jump_forward_max_rollback", "jump_forward_max_blocks", "block_size")

Guarantee = dict[str, Any]  # plain JSON values, by name
_NATIVE_BITS = ("layers/", "recurrent/", "sampling/")  # folders of kernels whose bits are not PyTorch's
_SOURCES = ("kernels", "rollout/model", "rollout/sharding")  # code of this package that bits depend on


def guarantee(model: HostedModel) -> Guarantee:
    """Return what the bits of a hosted model's answers depend on besides weights, prompt, settings and seed.

    Equal values mean equal bits, on whatever machine; `differences` names those that differ. Without invariant mode
    (`invariant` false) nothing is promised: an answer depends on its batch mates too. All values are plain JSON.
    """
    found = model.numerics.guarantee
    dtype, device = model.dtype, model.device
    uses_library = found is None or found.linear in ("padded", "rows")
    is_native = found is not None and "native" in (found.linear, found.attention)
    lacks = _lacks() if device.type == "cpu" else []
    return {
        "invariant": found is not None and found.invariant,
        "dtype": str(dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "linear": "library" if found is None else found.linear,
        "row_multiple": 1 if found is None else found.row_multiple,
        "attention": "library" if found is None else found.attention,
        "isa": native_path(dtype) if is_native else "",
        "threads": torch.get_num_threads() if uses_library and device.type == "cpu" else 0,  # 0: any number
        "k_blocks": model.k_blocks,
        "draws": DRAW_DEFINITION,
        "model": _model_hash(model),
        "versions": _versions(),
    } | ({"lacks": lacks} if lacks else {})


def _lacks() -> list[str]:
    """Return the native kernels that this process has no library of, and computes with other bits. Product and
    attention have names of their own; the model has run, and so has asked for all others that it uses."""
    native.load(sampling.SOURCE)
    return [Path(source).stem for source in native.lacking() if source.startswith(_NATIVE_BITS)]


def differences(claimed: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return what differs between two guarantees, each as a line "isa: avx512_bf16 there, avx2 here"; versions of
    libraries as `versions.torch`."""
    flat_claimed, flat_here = _flat(claimed), _flat(here)
    return [
        f"{name}: {flat_claimed.get(name)} there, {flat_here.get(name)} here"
        for name in sorted({*flat_claimed, *flat_here})
        if flat_claimed.get(name) != flat_here.get(name)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in values.items() if name != "versions"}
    return flat | {f"versions.{name}": value for name, value in (values.get("versions") or {}).items()}


def _model_hash(model: HostedModel) -> str:
    """Return the hash of the module's class and configuration, which name all that is computed with the weights."""
    # Where the model was found, who wrote the file and how it was loaded changes nothing.
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures",
               "output_attentions", "output_hidden_states", "return_dict", "problem_type"}  # fmt: skip
    config = {name: value for name, value in model.config.to_dict().items() if name not in ignored}
    # An infinity, which `time_step_limit` of some families has, is hashed as the text "Infinity".
    return sha256_of([type(model.module).__name__, json.loads(json.dumps(config, default=str), parse_constant=str)])


@cache
def _versions() -> dict[str, str]:
    """Return the versions of what computes the bits; of this package's own code a hash."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {**libraries, "lockstep": digest.hexdigest()[:16]}


# -- the canonical form -----------------------------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """Return JSON with sorted keys, without spaces, in ASCII. Raises ValueError for a NaN or an infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def sha256_of(value: object) -> str:
    """Return the SHA-256 of a value's canonical form, in hexadecimal digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def float_bits(values: Iterable[float]) -> list[int]:
    """Return float32 numbers as the unsigned integers of their 32 bits. Raises OverflowError for a larger number."""
    return array("I", array("f", values).tobytes()).tolist()


# -- receipts ---------------------------------------------------------------------------------------------------------

_NO_BITS = ("n", "sampling_seed", "stream_interval", "custom_params", "max_new_tokens")  # the last is always written


def settings_json(params: SamplingParams) -> dict[str, Any]:
    """Return sampling settings as a receipt has them: those that are not the default, numbers with a point as text of
    their bits (`float.hex`)."""
    default = SamplingParams()
    pairs = ((field.name, getattr(params, field.name)) for field in fields(params))
    changed = {name: value for name, value in pairs if name not in _NO_BITS and value != getattr(default, name)}
    return {name: _exact(value) for name, value in changed.items()} | {"max_new_tokens": params.max_new_tokens}


def settings_of(settings: Mapping[str, Any]) -> SamplingParams:
    """Return the settings of `settings_json`. Raises ValueError naming what is wrong with them."""
    values = {name: _inexact(name, value) for name, value in settings.items()}
    return SamplingParams.from_dict(values)


def _exact(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): float(one).hex() for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _inexact(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {int(key): float.fromhex(one) for key, one in value.items()}
    return float.fromhex(value) if name in _FLOATS and isinstance(value, str) else value


_FLOATS = {field.name for field in fields(SamplingParams) if isinstance(field.default, float)}


def listed(
    prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], *, in_full: bool
) -> dict[str, Any]:
    """Return the tokens and log-probabilities of a receipt, in full or as digests."""
    values = {"prompt": list(prompt_ids), "output": list(token_ids), "logprobs": float_bits(logprobs)}
    return values if in_full else {name: digest_of(value) for name, value in values.items()}


def digest_of(values: Sequence[int]) -> dict[str, Any]:
    """Return what stands in a receipt in the place of a list of integers: its hash and its length."""
    return {"sha256": sha256_of(list(values)), "num": len(values)}


def is_in_full(receipt: Mapping[str, Any]) -> bool:
    """Return whether a receipt has its tokens and log-probabilities, and not their digests."""
    return all(isinstance(receipt.get(name), list) for name in LISTS)


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a receipt of these values, with the format's number and its own hash."""
    values = {"format": FORMAT, **values}
    return {**values, HASH: _hash_of(values)}


def seal_is_whole(receipt: Mapping[str, Any]) -> bool:
    """Return whether a receipt's hash is that of its other values."""
    return receipt.get(HASH) == _hash_of(receipt)


def _hash_of(receipt: Mapping[str, Any]) -> str:
    """Return the hash of a receipt with its lists as digests, so that it has the same hash with either."""
    values = {name: value for name, value in receipt.items() if name != HASH}
    return sha256_of(values | {name: digest_of(values[name]) for name in LISTS if isinstance(values.get(name), list)})


def batch_hash(receipts: Iterable[Mapping[str, Any]]) -> str:
    """Return one hash over the hashes of several receipts, in their order."""
    return sha256_of([receipt[HASH] for receipt in receipts])


def breaks_in_chain(receipts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name every receipt that does not follow on the one before it, among those given of the same engine, in any
    order; and every number that several receipts of one engine have."""
    by_place: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for receipt in receipts:  # the same one may be given twice
        by_place.setdefault((receipt["engine"], receipt["number"]), {})[receipt[HASH]] = receipt
    found = []
    for (engine, number), here in sorted(by_place.items(), key=lambda item: item[0]):
        if len(here) > 1:
            found.append(f"{len(here)} different receipts are number {number} of engine {engine}")
        before = by_place.get((engine, number - 1), {"": {}} if number == 0 else {})
        if before and any(receipt["previous"] not in before for receipt in here.values()):
            found.append(f"receipt {number} of engine {engine} does not follow on receipt {number - 1}")
    return found


def num_absent(receipts: Iterable[Mapping[str, Any]]) -> int:
    """Return how many receipts, by their numbers, lie between those that are given of the same engine."""
    numbers: dict[str, set[int]] = {}
    for receipt in receipts:
        numbers.setdefault(receipt["engine"], set()).add(receipt["number"])
    return sum(max(its) - min(its) + 1 - len(its) for its in numbers.values())
