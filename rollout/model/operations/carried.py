"""The keywords of a forward that its attention needs, also where a module's layers do not hand them on.

Some layers take any keyword and give their attention none (Nemotron, StableLM), others take none. So a model's
outermost forward keeps them for its thread while it runs, and an attention that was told nothing finds them here.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

STEP_KEYWORD = "lockstep_step"  # carries a StepContext through the module's forward down to its attention
PACKING = "cu_seq_lens_q"  # row offsets of the sequences of the trainer's packed row
SHARED_ROWS = "lockstep_shared_rows"  # `SharedRows` of packed sequences, in the place of PACKING
_CARRIED = (STEP_KEYWORD, PACKING, SHARED_ROWS, "position_ids")
_NEEDS_MASK = "lockstep_needs_mask"  # of a forward whose code works with its mask, also where none would do

Forward = Callable[..., Any]

_of_thread = threading.local()  # .keywords: of the forward that runs now


def carried() -> Mapping[str, object] | None:
    """Return the keywords of the forward that runs now in this thread; None outside of one."""
    return getattr(_of_thread, "keywords", None)


def told(keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keywords of a call inside a forward, with those of the forward where it was told of none."""
    now = carried()
    is_told = any(keywords.get(name) is not None for name in (PACKING, SHARED_ROWS))
    if now is None or STEP_KEYWORD in keywords or is_told:
        return keywords
    given = {name: value for name, value in keywords.items() if value is not None}
    return {name: value for name, value in {**now, **given}.items() if name != _NEEDS_MASK}


def needs_mask() -> bool:
    """Return whether code of the forward that runs now works with its mask, also where none would do."""
    return bool((carried() or {}).get(_NEEDS_MASK))


@contextmanager
def carrying(keywords: Mapping[str, object] | None) -> Iterator[None]:
    """Carry these keywords to the attention of the forwards in the context, in the place of those carried before."""
    before = carried()
    _of_thread.keywords = keywords
    try:
        yield
    finally:
        _of_thread.keywords = before


def carrying_forward(forward: Forward, takes: Forward, *, masks: bool = False) -> Forward:
    """Return the forward of a model that carries its keywords, unless it runs inside another that does.

    takes: the forward of its class. Those keywords that this does not take end here. masks: see `needs_mask`.
    """
    left_out = _left_out(takes)

    def run(*args: Any, **named: Any) -> Any:
        kept = {name: named[name] for name in _CARRIED if name in named}
        if masks:
            kept[_NEEDS_MASK] = True
        for name in left_out:
            named.pop(name, None)
        if carried() is not None:
            return forward(*args, **named)
        with carrying(kept):
            return forward(*args, **named)

    return run


@cache
def _left_out(forward: Forward) -> tuple[str, ...]:
    parameters = inspect.signature(forward).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return () if takes_all else tuple(name for name in (STEP_KEYWORD, PACKING, SHARED_ROWS) if name not in parameters)
