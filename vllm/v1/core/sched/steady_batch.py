"""The sequences of a step that got one token each and have nothing else to tell: nearly all, in nearly all steps.

Who they are is found once; as long as the same requests run, a step costs a few operations a token.
"""

import collections
from collections.abc import Sequence

from vllm.v1.request import Request

_exhaust = collections.deque[None](maxlen=0).extend  # makes all calls of a map


class SteadyBatch:
    """Sequences that go on together; those that want rows come first."""

    __slots__ = (
        "_end_ids",
        "_num_steps_left",
        "_outputs",
        "batch_id",
        "num_scored",
        "planned_ids",
        "request_ids",
        "requests",
    )

    def __init__(self, planned_ids: list[str], scored: list[Request], plain: list[Request]) -> None:
        self.batch_id: int | None = None  # None: the next step is another's
        self.planned_ids = planned_ids  # of the whole step, others among them
        self.num_scored = len(scored)
        self.requests = requests = scored + plain
        self.request_ids = [request.request_id for request in requests]
        self._outputs = [request.output_token_ids for request in requests]
        self._end_ids = [(i, request.end_token_ids) for i, request in enumerate(requests) if request.end_token_ids]
        # Before so many steps are over, none has come to its last position.
        self._num_steps_left = min((r.max_positions - r.num_computed_tokens for r in requests), default=0)

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Give each its token, whose one position has run; return the places of those that it may have ended."""
        _exhaust(map(list.append, self._outputs, token_ids))
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_scheduled_tokens = None
        self._num_steps_left -= 1
        may_end = {place for place, end_ids in self._end_ids if token_ids[place] in end_ids}
        if self._num_steps_left <= 0:
            requests = enumerate(self.requests)
            may_end.update(i for i, request in requests if request.num_computed_tokens >= request.max_positions)
        return sorted(may_end)
