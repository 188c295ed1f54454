"""Names for the blocks of a token prefix: a chained 64-bit hash per full block.

Equal prefixes have equal hashes in any process and run: the first hash covers a seed and the salt, each further one its
parent's hash, the block's tokens, and the key of its images if it has one (`media/kv_keys.py`). A hash is for quick
lookup; the reader of a found block compares the tokens and the key too, so a collision only costs a cache hit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType

_HASH_SEED = b"lockstep-kv-1"
_NO_KEYS: Mapping[int, str] = MappingProxyType({})


def root_hash(salt: str = "") -> int:
    """Return the hash that the first block of a prefix chains from. Different salts (`extra_key`) give different
    chains."""
    return _from_bytes(_digest(_HASH_SEED + salt.encode(errors="surrogatepass")))


def block_hash(parent_hash: int, tokens: bytes, image_key: str = "") -> int:
    """Return the chained hash of one full block, a signed 64-bit number. tokens: `token_bytes` of the block."""
    return _from_bytes(_digest(_to_bytes(parent_hash) + tokens + image_key.encode()))


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as they are hashed, compared and kept: 4 bytes each, little-endian."""
    return array("i", token_ids).tobytes()


def token_list(tokens: bytes) -> list[int]:
    """Decode the ids that `token_bytes` encoded."""
    return array("i", tokens).tolist()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _to_bytes(hash: int) -> bytes:
    return hash.to_bytes(8, "little", signed=True)


def _from_bytes(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)


class Prefix:
    """The full blocks of a growing list of tokens; each is hashed once, at its first use."""

    __slots__ = ("salt", "_block_size", "_token_ids", "_image_keys", "_hashes", "_tokens")

    def __init__(
        self, token_ids: Sequence[int], block_size: int, salt: str = "", image_keys: Mapping[int, str] = _NO_KEYS
    ) -> None:
        """Name the blocks of these tokens. image_keys: by the number of the block, see `media/kv_keys.py`."""
        self.salt = salt
        self._image_keys = image_keys
        self._block_size = block_size
        self._token_ids = token_ids
        self._hashes: list[int] = []
        self._tokens: list[bytes] = []

    def with_other_end(self, token_ids: Sequence[int], num_blocks: int) -> Prefix:
        """Return the prefix of tokens that begin with the same `num_blocks` blocks, of which it has those hashed here.
        The salt and the keys of images are the same too."""
        other = Prefix(token_ids, self._block_size, self.salt, self._image_keys)
        other._hashes, other._tokens = self._hashes[:num_blocks], self._tokens[:num_blocks]
        return other

    def hash(self, index: int) -> int:
        """Return the chained hash of full block number `index`."""
        if index >= len(self._hashes):
            self._reach(index + 1)
        return self._hashes[index]

    def tokens(self, index: int) -> bytes:
        """Return the tokens of full block number `index`."""
        if index >= len(self._hashes):
            self._reach(index + 1)
        return self._tokens[index]

    def image_key(self, index: int) -> str:
        """Return the key of the images of full block number `index`; "" for one without."""
        return self._image_keys.get(index, "")

    def blocks(self, start: int, stop: int) -> Iterable[tuple[int, bytes, str]]:
        """Return hash, tokens and key of images of the full blocks number `start` to `stop` - 1."""
        if stop > len(self._hashes):
            self._reach(stop)
        keys = map(self.image_key, range(start, stop)) if self._image_keys else repeat("", stop - start)
        return zip(self._hashes[start:stop], self._tokens[start:stop], keys, strict=True)

    def cut(self, num_blocks: int) -> None:
        """Forget the hashes after the first `num_blocks` blocks, because later tokens may have changed."""
        del self._hashes[num_blocks:], self._tokens[num_blocks:]

    def _reach(self, num_blocks: int) -> None:
        num_known, size = len(self._hashes), self._block_size
        num_full = len(self._token_ids) // size  # every full block at once: one pass over a prompt, not one per block
        assert num_blocks <= num_full, "only full blocks have a hash"
        data = token_bytes(self._token_ids[num_known * size : num_full * size])
        blocks = [data[start : start + size * 4] for start in range(0, len(data), size * 4)]
        parent = _to_bytes(self._hashes[-1] if self._hashes else root_hash(self.salt))
        digests, blake2b = [], hashlib.blake2b
        told = blocks
        if self._image_keys:
            told = [own + self.image_key(index).encode() for index, own in enumerate(blocks, start=num_known)]
        for own in told:  # as `block_hash`, at half its cost
            parent = blake2b(parent + own, digest_size=8).digest()
            digests.append(parent)
        self._hashes += [int.from_bytes(digest, "little", signed=True) for digest in digests]
        self._tokens += blocks
