"""The sequences of a step that run one position and report a token and its logprobs only: most, in most steps.

Who they are is decided when a step is scheduled. As long as they stay the same, a step costs a few operations a token.
"""

import collections
from collections.abc import Sequence

from vllm.v1.messages import DecodeBatchTokens, SampledTokens
from vllm.v1.request import Request

_exhaust = collections.deque[None](maxlen=0).extend  # makes all calls of a map


class DecodeBatch:
    """Sequences that decode together; those that want logprobs come first."""

    def __init__(self, batch_id: int | None, requests: list[Request], num_scheduled_tokens: dict[str, int]) -> None:
        self.batch_id = batch_id  # None: others run in the step too, so the next one is decided anew
        self.num_scheduled_tokens = num_scheduled_tokens  # of the whole step
        self.requests = requests = sorted(requests, key=lambda request: not request.wants_rows)
        self.request_ids = [request.request_id for request in requests]
        self._outputs = [request.output_token_ids for request in requests]
        self._end_ids = [(i, request.end_token_ids) for i, request in enumerate(requests) if request.end_token_ids]
        # Before so many steps are over, none has come to its last position.
        self._num_steps_left = min((r.max_positions - r.num_computed_tokens for r in requests), default=0)
        self._sampled_ids: list[str] | None = None  # in the runner's order; None before the first step has run
        self._places: list[int] = []  # of the requests in that order
        self._rows: list[int] = []

    def take(self, sampled: SampledTokens) -> DecodeBatchTokens:
        """Give each its token, whose one position has run."""
        if self._sampled_ids is None:
            self._find_places(sampled)
        assert sampled.request_ids == self._sampled_ids, "a decode batch was sampled from in another order"
        runs = sampled.token_ids
        token_ids = [runs[place][0] for place in self._places]
        _exhaust(map(list.append, self._outputs, token_ids))
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_scheduled_tokens = None
        self._num_steps_left -= 1
        return DecodeBatchTokens(
            request_ids=self.request_ids, token_ids=token_ids, rows=self._rows, batch_id=self.batch_id
        )

    def _find_places(self, sampled: SampledTokens) -> None:
        place_of = {request_id: place for place, request_id in enumerate(sampled.request_ids)}
        self._sampled_ids = sampled.request_ids
        self._places = [place_of[request_id] for request_id in self.request_ids]
        rows = (sampled.rows[place] for place in self._places)
        self._rows = [row_range.first for row_range in rows if row_range is not None]

    def find_candidates(self, token_ids: Sequence[int]) -> list[int]:
        """Return the places of those that their newest tokens may have ended."""
        places = {place for place, end_ids in self._end_ids if token_ids[place] in end_ids}
        if self._num_steps_left <= 0:
            requests = enumerate(self.requests)
            places.update(i for i, request in requests if request.num_computed_tokens >= request.max_positions)
        return sorted(places)
