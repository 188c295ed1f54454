"""The base class of all sections of the job's settings, and checks that several make of their values."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ....rollout.config import parse_kv_size

Fault = tuple[str, str]  # a key, and the reason for which its value is refused
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # it stands in the names of metrics
_BEYOND = 2**63


class Section(ABC):
    """One table of the job's TOML."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """List every value that is out of range, by its key in this section."""

    def all_faults(self) -> list[Fault]:
        """List the faults; of a value that no setting of its kind may have, that alone."""
        strange = _strange(vars(self))
        keys = {key for key, _ in strange}
        return strange + [(key, why) for key, why in self.faults() if key not in keys]


def _strange(values: Mapping[str, object]) -> list[Fault]:
    """List numbers that are not finite or beyond 64 bits, and texts with a NUL, which no file or function takes."""
    found = []
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            found.append((name, f"must be a finite number, not {value}"))
        elif isinstance(value, int) and not -_BEYOND <= value < _BEYOND:
            found.append((name, f"must fit into 64 bits, not {value}"))
        elif isinstance(value, str) and "\0" in value:
            found.append((name, f"must not have a NUL character, as {value!r} has"))
        elif isinstance(value, Section):
            found += [(f"{name}.{key}", why) for key, why in _strange(vars(value))]
    return found


def too_small(settings: object, *names: str) -> list[Fault]:
    """List the named settings that are less than 1."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be at least 1, not {value}") for name, value in values.items() if value < 1]


def negative(settings: object, *names: str) -> list[Fault]:
    """List the named settings that are less than 0."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must not be negative, not {value}") for name, value in values.items() if value < 0]


def not_positive(settings: object, *names: str) -> list[Fault]:
    """List the named settings that are not more than 0."""
    values = {name: getattr(settings, name) for name in names}
    return [(name, f"must be positive, not {value}") for name, value in values.items() if not value > 0]


def not_among(settings: object, name: str, choices: Sequence[str]) -> list[Fault]:
    """List the setting if it is none of the choices."""
    value = getattr(settings, name)
    *first, last = (f'"{choice}"' for choice in choices)
    return [] if value in choices else [(name, f"must be {', '.join(first)} or {last}, not {value!r}")]


def faults_by_name(sections: Mapping[str, Section], setting: str) -> list[Fault]:
    """List the faults of the sections of a table, and names that metrics cannot have."""
    found = [(f"{setting}.{name}.{key}", why) for name, one in sections.items() for key, why in one.all_faults()]
    wrong = [name for name in sections if not _NAME.fullmatch(name)]
    return found + [(setting, f"needs names of letters, digits and _ . -, not {name!r}") for name in wrong]


def bytes_of(text: str) -> int:
    """Parse a number of bytes, written like the size of the KV pool. Raises ValueError, which does not name the key."""
    try:
        size = parse_kv_size(text).num_bytes
    except ValueError:
        size = None  # the error's message is about another setting
    if size is None:
        raise ValueError(f'must be bytes ("512MiB"), not {text!r}')
    return size
