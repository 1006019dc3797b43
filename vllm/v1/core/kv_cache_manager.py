"""Which KV blocks a request owns: allocation, prefix hits, the fork, copy-on-write, and giving blocks back.

A block is written by one owner only. Blocks get several owners in two ways: a prefix hit (always full blocks, which
nobody writes again) and a fork (the prompt's blocks, the last one perhaps partial). Who writes into a block that others
own too gets a copy first; the last owner writes in place.

*Idle* blocks are held by requests that wait: the prompt of children that have no seat yet, and what a preempted request
shares with others. They are the first to be freed when memory is short, as far as that frees anything.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.messages import BlockCopy
from vllm.v1.request import Request, SharedBlocks

# 128 bits: two prefixes with one hash are not to be expected in the life of the universe.
_HASH_BYTES = 16
_TOKEN_BYTES = array("i").itemsize


class Hits(NamedTuple):
    """What of a waiting request's prompt the prefix cache holds."""

    block_ids: list[int] = []
    source: int | None = None  # a block that begins as the next one does: to be copied
    num_partial: int = 0  # positions of it


_NO_HITS = Hits()


class KVCacheManager:
    """The tables of all requests over one pool of blocks."""

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        # What is computed under an older generation stays out of the cache (see reset_prefix_cache).
        self._generation = 0
        self._idle: dict[int, Request | SharedBlocks] = {}  # by id(): holders that don't run, with at least one block

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.pool.num_used

    # ------------------------------------------------------------ prefix cache

    def get_computed_blocks(self, request: Request) -> Hits:
        """Return the cached blocks that continue what a waiting request holds; it does not own them yet."""
        skips = request.sampling_params.skip_reading_prefix_cache is True
        held = self._get_held(request)
        if not self.enable_caching or skips or len(held) * self.block_size != request.num_computed_tokens:
            return Hits()
        num_blocks = request.num_readable_tokens // self.block_size
        self._hash_blocks(request, num_blocks)
        first_stated = (request.num_scored - 1) // self.block_size if request.has_pending_scores else num_blocks
        hits: list[int] = []
        for index in range(len(held), num_blocks):
            block_id = self.pool.find(request.block_hashes[index])
            if block_id is None or (index >= first_stated and not self.pool.prompt_logprobs.num_states(block_id)):
                break
            hits.append(block_id)
        if request.keeps_scores:
            found = self.pool.partial.find_longest(*self.get_next_block(request, Hits(hits)))
            if found is not None:
                return Hits(hits, *found)
        return Hits(hits)

    def get_next_block(self, request: Request, hits: Hits) -> tuple[bytes, list[int]]:
        """Return the hash before the block behind `hits`, and the tokens of it that could be read from the cache."""
        index = len(self._get_held(request)) + len(hits.block_ids)
        first = index * self.block_size
        end = max(first, min(first + self.block_size, request.num_readable_tokens))
        return self._get_parent(request, index), request.get_token_ids(first, end)

    def _get_parent(self, request: Request, index: int) -> bytes:
        self._hash_blocks(request, index)
        return request.block_hashes[index - 1] if index else self._hash_salt(request.message.cache_salt)

    def cache_full_blocks(self, request: Request) -> None:
        """Enter the blocks that the last step filled into the prefix cache."""
        if not self.enable_caching or request.cache_generation != self._generation:
            return
        num_full, first = request.num_computed_tokens // self.block_size, request.num_cached_blocks
        if request.keeps_scores:
            self._remember_partial(request, first, num_full)
        if num_full <= first:
            return
        self._hash_blocks(request, num_full)
        for index in range(first, num_full):
            self.pool.remember(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = num_full

    def catch_up(self, requests: Iterable[Request]) -> None:
        """Enter the blocks that these have filled, and that are not in the prefix cache yet.

        A step of a decode batch leaves this out: it is enough before anybody looks for a prefix, and (`free` and
        `release_own_blocks` do it) before they lose their blocks.
        """
        for request in requests:
            if request.num_computed_tokens // self.block_size > request.num_cached_blocks:
                self.cache_full_blocks(request)

    def _remember_partial(self, request: Request, first: int, num_full: int) -> None:
        """Let prompts that part inside a block find the beginning of those filled, and of the prompt's last one."""
        size, num_computed = self.block_size, request.num_computed_tokens
        is_prompt_done = not request.output_token_ids and num_computed >= _count_prompt_positions(request)
        num_blocks = -(-num_computed // size) if is_prompt_done else num_full
        for index in range(first, num_blocks):
            block_id = request.block_ids[index]
            token_ids = request.get_token_ids(index * size, min(num_computed, (index + 1) * size))
            self.pool.prompt_logprobs.note_states(block_id, len(token_ids))
            self.pool.partial.remember(block_id, self._get_parent(request, index), token_ids)

    def list_blocks_to_come(self, request: Request) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the hash before, and the tokens of, each block that a running request will yet fill with its prompt."""
        end = _count_prompt_positions(request)
        is_cached = request.keeps_scores and self.enable_caching and request.cache_generation == self._generation
        if not is_cached or request.num_computed_tokens >= end:
            return
        for first in range(request.num_cached_blocks * self.block_size, end, self.block_size):
            token_ids = request.get_token_ids(first, min(first + self.block_size, end))
            yield self._get_parent(request, first // self.block_size), token_ids

    def reset_prefix_cache(self) -> None:
        """Forget every prefix, with requests running too.

        What those computed so far may be stale (new weights), and so may all that they build on it: their blocks are
        of an older generation and stay out of the cache until they start again from nothing.
        """
        self.pool.forget_all_prefixes()
        self._generation += 1

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Extend the request's chain of hashes: a block's covers its tokens and, by its parent's, all before them."""
        known = request.block_hashes
        if len(known) >= num_blocks:
            return
        size = self.block_size
        parent = known[-1] if known else self._hash_salt(request.message.cache_salt)
        token_bytes = array("i", request.get_token_ids(len(known) * size, num_blocks * size)).tobytes()
        added = []
        for start in range(0, len(token_bytes), size * _TOKEN_BYTES):
            block_bytes = token_bytes[start : start + size * _TOKEN_BYTES]
            parent = blake2b(parent + block_bytes, digest_size=_HASH_BYTES).digest()
            added.append(parent)
        request.block_hashes = (*known, *added)

    @staticmethod
    def _hash_salt(cache_salt: str | None) -> bytes:
        return b"" if cache_salt is None else blake2b(cache_salt.encode(), digest_size=_HASH_BYTES).digest()

    # ------------------------------------------------------------ giving and taking blocks

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Give a running request room for its next positions; return the blocks added, None if too few are free."""
        table = request.block_ids
        num_computed = request.num_computed_tokens
        num_added = -(-(num_computed + num_new_tokens) // self.block_size) - len(table)
        written = num_computed // self.block_size
        assert written >= len(table) or self.pool.num_owners[table[written]] == 1, (
            "a running request writes its own block"
        )
        if num_added <= 0:
            return []
        if num_added > self.pool.num_free:
            return None
        added = self.pool.take(num_added)
        table += added
        return added

    def try_grow_all(self, requests: Sequence[Request]) -> list[list[int]] | None:
        """Give each running request room for its next position; return the blocks added to each.

        None, with nothing changed: too few blocks are free.
        """
        size = self.block_size
        full = [i for i, request in enumerate(requests) if request.num_computed_tokens == len(request.block_ids) * size]
        if len(full) > self.pool.num_free:
            return None
        added: list[list[int]] = [[]] * len(requests)
        for i in full:
            added[i] = self.pool.take(1)
            requests[i].block_ids += added[i]
        return added

    def admit(
        self, request: Request, num_new_tokens: int, hits: Hits = _NO_HITS, num_spare_blocks: int = 0
    ) -> list[BlockCopy] | None:
        """Give a waiting request its table: what it holds, the `hits`, and room for `num_new_tokens` positions more.

        Returns the copies that must run before its first write (one, when that goes into a block of several owners or
        that begins as a cached one does), or None, with nothing changed, when fewer than `num_spare_blocks` would stay
        free.
        """
        held, block_ids = self._get_held(request), hits.block_ids
        pinned = [] if hits.source is None else [hits.source]  # what is to be copied must not be given away here
        first_position = request.num_computed_tokens + len(block_ids) * self.block_size
        num_blocks = -(-(first_position + hits.num_partial + num_new_tokens) // self.block_size)
        num_added = max(0, num_blocks - len(held) - len(block_ids))
        written = first_position // self.block_size
        must_copy = written < len(held) and self._has_other_owners(request, held[written])
        num_taken = num_added + must_copy + self.pool.count_ownerless((*block_ids, *pinned))
        if num_taken + num_spare_blocks > self.pool.num_free:
            return None

        if not held:
            request.cache_generation = self._generation
        self._take_possession(request)
        self.pool.touch((*block_ids, *pinned))
        request.block_ids += block_ids
        request.num_computed_tokens = first_position + hits.num_partial
        request.num_cached_blocks += len(block_ids)
        copies = []
        if must_copy:
            copies.append(BlockCopy(source=request.block_ids[written], target=self.pool.take(1)[0]))
            self.pool.prompt_logprobs.copy(*copies[0], first_position % self.block_size)
            self.pool.release([copies[0].source])
            request.block_ids[written] = copies[0].target
        request.block_ids += self.pool.take(num_added)
        if hits.source is not None:
            copies.append(BlockCopy(source=hits.source, target=request.block_ids[written]))
            self.pool.prompt_logprobs.copy(*copies[0], hits.num_partial)
            self.pool.release(pinned)
        return copies

    def free(self, request: Request) -> None:
        """Take everything from a request that ends, wherever it stands."""
        if request.shared_blocks is not None:
            self._leave_shared(request.shared_blocks)
            request.shared_blocks = None
            return
        self._idle.pop(id(request), None)
        self.catch_up((request,))
        self.pool.release(request.block_ids)
        request.block_ids = []

    def fork(self, family: Request, num_children: int) -> SharedBlocks:
        """Make the blocks of a family its children's; costs as much as the prompt has blocks, whatever their number."""
        shared = SharedBlocks(family.block_ids, num_children, family.precedence)
        family.block_ids = []
        self._idle[id(shared)] = shared
        return shared

    def has_lost_blocks(self, child: Request) -> bool:
        """Say whether a child that waits was to hold more of its prompt than is left of it."""
        shared = child.shared_blocks
        return shared is not None and len(shared.block_ids) * self.block_size < child.num_computed_tokens

    def accept_loss(self, child: Request) -> None:
        """Let a child that waits recompute what `has_lost_blocks` found missing."""
        shared = child.shared_blocks
        assert shared is not None, f"{child.request_id} shares nothing"
        child.num_computed_tokens = len(shared.block_ids) * self.block_size

    # ------------------------------------------------------------ when memory is short

    def may_grow(self, request: Request) -> bool:
        """Say whether `request` may yet need another block."""
        return len(request.block_ids) * self.block_size < request.max_positions

    def release_own_blocks(self, request: Request) -> None:
        """Take from a preempted request all but the leading blocks that others own too: freeing those frees nothing."""
        self.catch_up((request,))
        num_owners = self.pool.num_owners
        num_kept = sum(1 for _ in takewhile(lambda block_id: num_owners[block_id] > 1, request.block_ids))
        frees_some = num_kept < len(request.block_ids) or request.num_missing_tokens == 0 or request.has_pending_scores
        assert frees_some, f"{request.request_id} is preempted and frees nothing"
        self._cut_table(request, num_kept)
        if num_kept:
            self._idle[id(request)] = request

    def reclaim_idle(self, num_blocks: int) -> bool:
        """Let waiting holders, latest first, give up blocks until `num_blocks` are free; say whether they are.

        They go from the end of a table, one by one, and only where that comes to a block that no running request owns.
        """
        if self.pool.num_free < num_blocks and self._idle:
            holders = sorted(self._idle.values(), key=lambda holder: holder.precedence, reverse=True)
            num_idle_owners = Counter(block_id for holder in holders for block_id in holder.block_ids)
            freeable = {b for b, num_owners in num_idle_owners.items() if num_owners == self.pool.num_owners[b]}
            for holder in holders:
                num_fixed = sum(1 for _ in takewhile(lambda block_id: block_id not in freeable, holder.block_ids))
                while self.pool.num_free < num_blocks and len(holder.block_ids) > num_fixed:
                    self._cut_table(holder, len(holder.block_ids) - 1)
                if not holder.block_ids:
                    del self._idle[id(holder)]
        return self.pool.num_free >= num_blocks

    def _cut_table(self, holder: Request | SharedBlocks, num_kept: int) -> None:
        self.pool.release(holder.block_ids[num_kept:])
        del holder.block_ids[num_kept:]
        if isinstance(holder, Request):
            holder.num_computed_tokens = min(holder.num_computed_tokens, num_kept * self.block_size)
            holder.num_cached_blocks = min(holder.num_cached_blocks, num_kept)

    # ------------------------------------------------------------ holding what waits

    @staticmethod
    def _get_held(request: Request) -> list[int]:
        return request.block_ids if request.shared_blocks is None else request.shared_blocks.block_ids

    def _has_other_owners(self, request: Request, block_id: int) -> bool:
        shared = request.shared_blocks
        is_one_of_many = shared is not None and shared.num_holders > 1
        return is_one_of_many or self.pool.num_owners[block_id] > 1

    def _take_possession(self, request: Request) -> None:
        """Turn what a waiting request holds into a table of its own."""
        self._idle.pop(id(request), None)
        shared = request.shared_blocks
        if shared is None:
            return
        request.shared_blocks = None
        request.block_ids = shared.block_ids.copy()
        request.num_cached_blocks = request.num_computed_tokens // self.block_size
        self.pool.touch(request.block_ids)
        self._leave_shared(shared)

    def _leave_shared(self, shared: SharedBlocks) -> None:
        shared.num_holders -= 1
        if shared.num_holders == 0:
            self._idle.pop(id(shared), None)
            self.pool.release(shared.block_ids)
            shared.block_ids = []


def _count_prompt_positions(request: Request) -> int:
    """Return how many positions of the prompt run: all, unless the prompt is only scored."""
    return min(request.num_prompt_tokens, request.max_positions)
