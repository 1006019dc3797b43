"""The KV blocks by number: who owns one, which is free, which holds what prefix.

    free (no owner) ◀──release── owned (one owner or several)
      │ ▲ may still hold a cached prefix      ▲
      └─┴──────── take / touch ───────────────┘

A block with no owner stays in the prefix cache until its place is needed: the free queue gives away blocks without a
prefix first, then the prefix that was left longest ago.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm.v1.core.partial_prefixes import PartialPrefixes
from vllm.v1.core.prompt_logprobs_index import PromptLogprobsIndex


class BlockPool:
    """Blocks 0 … num_blocks − 1, their owners counted, and the prefix cache over full ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_owners = [0] * num_blocks
        # A linked list with O(1) removal from the middle; it gives away from the front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self.prompt_logprobs = PromptLogprobsIndex(num_blocks)
        self.partial = PartialPrefixes()  # of blocks with hidden states

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    # ------------------------------------------------------------ owners

    def take(self, num_blocks: int) -> list[int]:
        """Return new blocks, each with one owner; what they held of the prefix cache is forgotten."""
        assert num_blocks <= len(self._free), f"{num_blocks} blocks asked, {len(self._free)} free"
        taken = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in taken:
            self._forget_prefix(block_id)
            self.prompt_logprobs.forget(block_id)
            self.partial.forget(block_id)
            self.num_owners[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Give each block one more owner."""
        for block_id in block_ids:
            if self.num_owners[block_id] == 0:
                del self._free[block_id]
            self.num_owners[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one owner from each block of a table, whose end is the first to be given away."""
        for block_id in reversed(block_ids):
            assert self.num_owners[block_id] > 0, f"block {block_id} has no owner to release it"
            self.num_owners[block_id] -= 1
            if self.num_owners[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._hash_of_block and block_id not in self.partial:
                    # Nobody can ask for it by its prefix; a block just used is the best to write next.
                    self._free.move_to_end(block_id, last=False)

    def count_ownerless(self, block_ids: Iterable[int]) -> int:
        return sum(self.num_owners[block_id] == 0 for block_id in block_ids)

    # ------------------------------------------------------------ prefix cache

    def find(self, block_hash: bytes) -> int | None:
        """Return the block that holds the prefix, if one does."""
        return self._block_of_hash.get(block_hash)

    def remember(self, block_id: int, block_hash: bytes) -> None:
        """Enter a full, computed block into the prefix cache.

        The first block with a prefix keeps it, unless the new one has hidden states and the old one has none.
        """
        if block_id in self._hash_of_block:
            return
        old = self._block_of_hash.get(block_hash)
        if old is not None:
            if self.prompt_logprobs.num_states(old) >= self.prompt_logprobs.num_states(block_id):
                return
            del self._hash_of_block[old]
            if self.num_owners[old] == 0:
                self._free.move_to_end(old, last=False)
        self._block_of_hash[block_hash] = block_id
        self._hash_of_block[block_id] = block_hash

    def forget_all_prefixes(self) -> None:
        self._block_of_hash.clear()
        self._hash_of_block.clear()
        self.prompt_logprobs.forget_all()
        self.partial.forget_all()

    def _forget_prefix(self, block_id: int) -> None:
        block_hash = self._hash_of_block.pop(block_id, None)
        if block_hash is not None:
            del self._block_of_hash[block_hash]
