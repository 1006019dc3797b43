"""Which tokens cached blocks hold, by the prefix before them: for prompts that part in the middle of a block.

The prefix cache finds full blocks that are equal from end to end. Who shares only the beginning of one, or a block that
was never filled, finds it here, and copies it.
"""

from collections.abc import Sequence
from itertools import islice

_MAX_CANDIDATES = 256  # looked at for one prefix; the youngest


class PartialPrefixes:
    """Blocks by the hash of all that stands before them."""

    def __init__(self) -> None:
        self._blocks_after: dict[bytes, dict[int, Sequence[int]]] = {}  # → block id → its tokens
        self._parent_of: dict[int, bytes] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._parent_of

    def remember(self, block_id: int, parent: bytes, token_ids: Sequence[int]) -> None:
        """Take note of the computed tokens of a block; what was known of it is replaced."""
        self.forget(block_id)
        self._blocks_after.setdefault(parent, {})[block_id] = token_ids
        self._parent_of[block_id] = parent

    def find_longest(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return the block that begins with the most of `token_ids`, and with how many; None: with not even one."""
        best = None
        for block_id, others in islice(reversed(self._blocks_after.get(parent, {}).items()), _MAX_CANDIDATES):
            num_common = count_common(token_ids, others)
            if num_common > (0 if best is None else best[1]):
                best = block_id, num_common
                if num_common == len(token_ids):
                    break
        return best

    def forget(self, block_id: int) -> None:
        parent = self._parent_of.pop(block_id, None)
        if parent is not None:
            blocks = self._blocks_after[parent]
            del blocks[block_id]
            if not blocks:
                del self._blocks_after[parent]

    def forget_all(self) -> None:
        self._blocks_after.clear()
        self._parent_of.clear()


def count_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    num_common = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        num_common += 1
    return num_common
