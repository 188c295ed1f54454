"""Digests of this rank's parts of tensors, which show the ranks whose bytes differ from the published ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


class PublishedParts:
    """The digests of this rank's parts of tensors, by name and the root of the whole tensor at that time."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[bytes, str]] = {}  # by name and the whole tensor's root

    def saw(self, own: Mapping[str, object], roots: Mapping[str, bytes]) -> None:
        """Keep the digests of these parts (`local_digests`) of tensors that have these roots."""
        for name in own.keys() & roots.keys():
            self._parts.setdefault(name, {})[roots[name]] = _digest(own[name])

    def keep(self, published: Mapping[str, bytes]) -> None:
        """Keep only the parts of tensors with these roots, which are published."""
        known = {name: self._parts.get(name, {}).get(root) for name, root in published.items()}
        self._parts = {name: {published[name]: part} for name, part in known.items() if part is not None}

    def differing(
        self, own: Mapping[str, object], roots: Mapping[str, bytes], published: Mapping[str, bytes]
    ) -> list[str]:
        """Return the names of the tensors that differ from the published ones. A tensor is judged by this rank's part
        where its published digest is known, else by the whole. own, roots: the present ones; a tensor without a root
        differs among the ranks that hold it."""
        names = []
        for name in own.keys() & published.keys():
            part = self._parts.get(name, {}).get(published[name])
            is_same = roots.get(name) == published[name] if part is None else part == _digest(own[name])
            if not is_same:
                names.append(name)
        return sorted(names)


def _digest(part: object) -> str:
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()
