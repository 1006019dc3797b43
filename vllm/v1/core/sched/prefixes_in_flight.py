"""Who should wait a step: a prompt that begins like one that is being computed finds keys, values and scores then."""

from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.partial_prefixes import count_common
from vllm.v1.request import Request

# A common first token or two (a begin-of-text token) are no reason to wait.
_MIN_COMMON_AT_START = 4


class PrefixesInFlight:
    """The blocks that running requests for prompt logprobs have yet to compute, in one step of the scheduler."""

    def __init__(self, kv: KVCacheManager, running: Iterable[Request]) -> None:
        self._kv = kv
        self._running = running
        # hash of a prefix → tokens of blocks behind it; None until somebody may have to wait
        self._blocks_after: dict[bytes, list[Sequence[int]]] | None = None

    def add(self, request: Request) -> None:
        """Take note of a request that has come to those that run."""
        if self._blocks_after is not None:
            self._add_to(self._blocks_after, request)

    def _add_to(self, blocks_after: dict[bytes, list[Sequence[int]]], request: Request) -> None:
        for parent, token_ids in self._kv.list_blocks_to_come(request):
            blocks_after.setdefault(parent, []).append(token_ids)

    def is_worth_waiting_for(self, request: Request) -> bool:
        """Say whether a request that waits would compute what one that runs is about to."""
        if not request.keeps_scores:
            return False
        if self._blocks_after is None:
            self._blocks_after = {}
            for other in self._running:
                self._add_to(self._blocks_after, other)
        if not self._blocks_after:
            return False
        hits = self._kv.get_computed_blocks(request)
        parent, token_ids = self._kv.get_next_block(request, hits)
        num_common = max((count_common(token_ids, those) for those in self._blocks_after.get(parent, ())), default=0)
        at_start = request.num_computed_tokens == 0 and not hits.block_ids
        return num_common > hits.num_partial and num_common >= (_MIN_COMMON_AT_START if at_start else 1)
