"""The keys of a group as strangers see them: without meaning, and impossible to forge.

A TCPStore answers every process that reaches its port, and lists its keys to it. So a secret that only names a prefix
would be read there. Here the secret makes other names and other values of all of them: a name is a keyed digest, a
value is encrypted, and authenticated under its name. A stranger can still destroy keys, which ends a rendezvous.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Protocol

_NONCE_BYTES = 16
_TAG_BYTES = 32


class Keys(Protocol):
    """The operations of a torch store that a weight group uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class NotSealed(RuntimeError):
    """A value that was not written by a process that knows the secret."""


class SealedStore:
    """A store under a secret. Counters (`add`) have sealed names and plain numbers."""

    def __init__(self, store: Keys, secret: str, scope: str) -> None:
        """Wrap a store. scope: a value copied from one scope to another is refused."""
        self._store = store
        self._names, self._stream, self._tags = (
            hmac.digest(secret.encode(), f"{scope}/{use}".encode(), "sha256") for use in ("names", "stream", "tags")
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        name, nonce = self._name(key), secrets.token_bytes(_NONCE_BYTES)
        hidden = self._mixed(value.encode() if isinstance(value, str) else bytes(value), nonce)
        sealed = nonce + hidden + self._tag(name, nonce + hidden)
        self._store.set(name, sealed)  # type: ignore[arg-type]  # torch's stores accept bytes too

    def get(self, key: str) -> bytes:
        """Return a value. Raises NotSealed where it was written without the secret, or for another name."""
        name = self._name(key)
        sealed = bytes(self._store.get(name))
        body, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if len(body) < _NONCE_BYTES or not hmac.compare_digest(tag, self._tag(name, body)):
            raise NotSealed("a key of the store was written by a process that does not know the group's secret")
        return self._mixed(body[_NONCE_BYTES:], body[:_NONCE_BYTES])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._store.add(self._name(key), amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._store.check([self._name(key) for key in keys])

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return self._store.delete_key(self._name(key))

    def _name(self, key: str) -> str:
        return hmac.digest(self._names, key.encode(), "sha256").hex()

    def _tag(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._tags, name.encode() + body, "sha256")

    def _mixed(self, data: bytes, nonce: bytes) -> bytes:
        """Encrypt or decrypt: the exclusive or with a key stream of SHAKE-256, which a nonce makes unique."""
        stream = hashlib.shake_256(self._stream + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")


def sealed(store: Keys, secret: str | None, scope: str) -> Keys:
    """Return the store under the secret, or the store itself for groups without one."""
    return store if secret is None else SealedStore(store, secret, scope)
