"""The cached paths of requests: which blocks of a prefix are in the tree, and which of them a request may take."""

from __future__ import annotations

from collections.abc import Sequence

from ..media.images import Images
from ..media.kv_keys import block_keys
from ..sequences.request import Request
from ..states.slots import SlotLedger
from .prefix import Prefix
from .radix_cache import Node, RadixCache


def prefix_of(token_ids: Sequence[int], images: Images | None, block_size: int, extra_key: str) -> Prefix:
    """Return the full blocks of tokens, by hash. images: of the prompt that they begin with."""
    if images is None:
        return Prefix(token_ids, block_size, extra_key)
    return Prefix(token_ids, block_size, extra_key, block_keys(images, block_size))


_PromptKey = tuple[str, int, tuple[int, ...]]
_NUM_TOKENS_IN_KEY = 32  # prompts that differ in no other token take turns: the tokens are compared in any case


def _prompt_key(request: Request) -> _PromptKey:
    """Return what the prompts of samples have in common and few others do: the salt, the length and some tokens."""
    sequence, num_tokens = request.sequence, request.sequence.num_prompt_tokens
    some = sequence.token_ids[: num_tokens : num_tokens // _NUM_TOKENS_IN_KEY + 1]
    return request.options.extra_key, num_tokens, tuple(some)


def _has_prompt_of(request: Request, other: Request) -> bool:
    """Return whether two requests of one key have the same prompt."""
    return request.images is other.images and _prompt_ids(request) == _prompt_ids(other)


def _prompt_ids(request: Request) -> list[int]:
    sequence = request.sequence
    ids, num_tokens = sequence.token_ids, sequence.num_prompt_tokens
    return ids if len(ids) == num_tokens else ids[:num_tokens]


class CachedPaths:
    """The paths in one tree. It remembers the prefixes of live requests, and changes no node."""

    def __init__(self, cache: RadixCache, block_size: int, prefix_cache: bool, states: SlotLedger | None) -> None:
        """Look in this tree. prefix_cache: whether requests take blocks from it; states: the slots of recurrent states,
        if the model has such layers."""
        self._cache, self._block_size, self._is_on, self._states = cache, block_size, prefix_cache, states
        self._prefixes: dict[Request, Prefix] = {}  # of live requests
        # Of waiting requests, whose tokens stay as they are: the cached path when each was matched last.
        self._paths: dict[Request, list[Node]] = {}
        self._newest: dict[_PromptKey, Request] = {}  # of those with a prefix, for each prompt

    def prefix(self, request: Request) -> Prefix:
        """Return the full blocks of a live request's tokens, by hash."""
        prefix = self._prefixes.get(request)
        if prefix is None:
            prefix = self._prefixes[request] = self._new_prefix(request)
        return prefix

    def _new_prefix(self, request: Request) -> Prefix:
        """Return the prefix of a request, with the hashes of the newest other request of the same prompt: hundreds of
        samples of one long prompt may come in one step."""
        key = _prompt_key(request)
        other = self._newest.get(key)
        self._newest[key] = request  # it is likely to live longer
        token_ids, size = request.sequence.token_ids, self._block_size
        if other is None or not _has_prompt_of(request, other):
            return prefix_of(token_ids, request.images, size, request.options.extra_key)
        return self._prefixes[other].with_other_end(token_ids, request.sequence.num_prompt_tokens // size)

    def cut(self, request: Request, num_blocks: int) -> None:
        """Forget the hashes after a request's first blocks, whose tokens may have changed."""
        self._paths.pop(request, None)
        if (prefix := self._prefixes.get(request)) is not None:
            prefix.cut(num_blocks)

    def begin(self, request: Request) -> None:
        """Drop the remembered path of a request that runs from now on."""
        self._paths.pop(request, None)

    def forget(self, request: Request) -> None:
        """Drop the remembered hashes and path of a request that has ended."""
        self._paths.pop(request, None)
        if self._prefixes.pop(request, None) is not None and self._newest.get(key := _prompt_key(request)) is request:
            del self._newest[key]

    def match(self, request: Request) -> list[Node]:
        """Return the cached path of the request's prefix, as far as it may be reused.

        With recurrent layers it ends at the deepest snapshot.
        """
        nodes = self.cached(request)
        return nodes if self._states is None else self.up_to_snapshot(nodes)

    def cached(self, request: Request) -> list[Node]:
        """Return the cached path of the request's prefix that may be reused, with snapshots of states or without.

        The path of its last match is the beginning, as far as it is still in the tree: the first one in the queue is
        matched in every step while it does not fit. The list is remembered: do not change it.
        """
        if not self._is_on:
            return []
        path = self._in_tree(self._paths.get(request, []))
        path = self._grown(path, self.prefix(request), request.max_reusable_tokens // self._block_size)
        self._paths[request] = path
        return path

    def of(self, prefix: Prefix, num_blocks: int) -> list[Node]:
        """Return the cached nodes of a prefix's first blocks, up to the first missing one."""
        return self._grown([], prefix, num_blocks)

    def _in_tree(self, path: list[Node]) -> list[Node]:
        """Return the nodes of a former path that are still in the tree.

        A node leaves it before its parent, or with all others, and for good: the block's next node is another one. So
        the nodes before one that is there are there too.
        """
        num_nodes = len(path)
        while num_nodes and self._cache.get(path[num_nodes - 1].hash) is not path[num_nodes - 1]:
            num_nodes -= 1
        return path if num_nodes == len(path) else path[:num_nodes]

    def _grown(self, path: list[Node], prefix: Prefix, num_blocks: int) -> list[Node]:
        """Return the cached nodes of a prefix's first blocks, given the first ones of them."""
        start = len(path)
        if start >= num_blocks:
            return path if start == num_blocks else path[:num_blocks]
        if self._cache.get(prefix.hash(start)) is None:  # before many blocks are copied in vain
            return path
        nodes = list(path)
        parent = nodes[-1] if nodes else None
        for hash, tokens, image_key in prefix.blocks(start, num_blocks):
            parent = self._cache.find(hash, tokens, parent, prefix.salt, image_key)
            if parent is None:
                break
            nodes.append(parent)
        return nodes

    def up_to_snapshot(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes up to the deepest one with a snapshot of the recurrent states."""
        assert self._states is not None
        num_nodes = len(nodes)
        while num_nodes and not self._states.has_snapshot(nodes[num_nodes - 1]):
            num_nodes -= 1
        return nodes[:num_nodes]
