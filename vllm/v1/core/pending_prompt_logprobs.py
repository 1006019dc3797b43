"""Which prompt logprobs of a request are pending although no position has to run for them.

Token i is scored by the row of position i − 1; its score is kept with the block that holds the token. So a token is
pending without a position to run when its row ran before: in an earlier step, or in another request with this prefix.
"""

from typing import NamedTuple

from vllm.v1.core.prompt_logprobs_index import PromptLogprobsIndex
from vllm.v1.messages import PromptRange
from vllm.v1.request import Request


class PendingPromptLogprobs(NamedTuple):
    """Prompt tokens first … end − 1, which want a score and need no position to run."""

    first: int
    end: int
    known: list[PromptRange]  # those whose scores their blocks keep; the others need a row of the LM head
    num_rows: int  # of the LM head
    is_whole: bool  # all that are pending


NOTHING_PENDING = PendingPromptLogprobs(0, 0, [], 0, is_whole=True)


def find_pending(request: Request, index: PromptLogprobsIndex, block_size: int, max_rows: int) -> PendingPromptLogprobs:
    """Return the pending tokens whose rows lie before the request's next position, with at most `max_rows` to make."""
    if not request.has_pending_scores:
        return NOTHING_PENDING
    first = request.num_scored
    end = min(request.num_computed_tokens + 1, request.num_prompt_tokens)
    known: list[PromptRange] = []
    num_rows, token = 0, first
    while token < end:
        block, place = divmod(token, block_size)
        is_kept = request.can_read_scores and block < len(request.block_ids)
        places = index.scored_places(request.block_ids[block]) >> place if is_kept else 0
        # the stretch of this block that is all kept, or all not
        stretch = _count_trailing_ones(places if places & 1 else ~places)
        stop = min(end, token + block_size - place, token + stretch)
        if places & 1:
            before = known.pop() if known and known[-1].end == token else PromptRange(token, token)
            known.append(PromptRange(before.first, stop))
        else:
            stop = min(stop, token + max_rows - num_rows)
            num_rows += stop - token
            if stop == token:
                break
        token = stop
    return PendingPromptLogprobs(first, token, known, num_rows, is_whole=token >= end)


def note_scored(request: Request, index: PromptLogprobsIndex, block_size: int, first: int, end: int) -> None:
    """Take note that the prompt tokens first … end − 1 have their scores, which their blocks now keep."""
    request.num_scored = end
    if not request.keeps_scores:
        return
    for block in range(first // block_size, min(-(-end // block_size), len(request.block_ids))):
        start = block * block_size
        index.note_scores(request.block_ids[block], max(first - start, 0), min(end - start, block_size))


def _count_trailing_ones(bits: int) -> int:
    """Return how many of the lowest bits are set; `bits` has one that is not, or is negative."""
    inverted = ~bits
    return (inverted & -inverted).bit_length() - 1 if inverted else 1 << 30
