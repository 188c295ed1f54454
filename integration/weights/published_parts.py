"""Which rank holds other bytes than were published: each remembers its part of every tensor, by the tensor's root."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


class PublishedParts:
    """What this rank's parts of tensors were, digested, when the whole tensors had the roots that were seen."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[bytes, str]] = {}  # by name and the whole tensor's root

    def saw(self, own: Mapping[str, object], roots: Mapping[str, bytes]) -> None:
        """Remember these parts (`local_digests`) of tensors that have these roots."""
        for name in own.keys() & roots.keys():
            self._parts.setdefault(name, {})[roots[name]] = _digest(own[name])

    def keep(self, published: Mapping[str, bytes]) -> None:
        """These roots are published: forget all others."""
        known = {name: self._parts.get(name, {}).get(root) for name, root in published.items()}
        self._parts = {name: {published[name]: part} for name, part in known.items() if part is not None}

    def differing(
        self, own: Mapping[str, object], roots: Mapping[str, bytes], published: Mapping[str, bytes]
    ) -> list[str]:
        """Names of the tensors that are not as published, by this rank's part where it is known what that was, else by
        the whole. own, roots: as they are now; a tensor without a root differs among the ranks that hold it."""
        names = []
        for name in own.keys() & published.keys():
            part = self._parts.get(name, {}).get(published[name])
            is_same = roots.get(name) == published[name] if part is None else part == _digest(own[name])
            if not is_same:
                names.append(name)
        return sorted(names)


def _digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()
