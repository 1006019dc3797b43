"""How much may wait for the core: what is beyond is refused on arrival."""

from collections.abc import Iterable

from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMValidationError
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats


class QueueLimits:
    """Counts what waits, and refuses what would be too much; None is no limit.

    Those sequences count as waiting that the core said do not run, and those beyond its seats. A prompt's tokens wait
    until its first output. A request that finds no tokens waiting enters, however long its prompt: else it never could.
    """

    def __init__(self, max_num_sequences: int | None, max_num_tokens: int | None, num_seats: int) -> None:
        self._max_num_sequences = _check_limit("max_num_queued_reqs", max_num_sequences)
        self._max_num_tokens = _check_limit("max_num_queued_tokens", max_num_tokens)
        self._num_seats = num_seats
        self._stats = SchedulerStats()
        self._unanswered: dict[str, int] = {}  # id of a request's first child → prompt tokens, before its first output

    def check(self, num_sequences: int, num_prompt_tokens: int, num_in_flight: int) -> None:
        """Raise unless so much more may come; `num_in_flight` sequences are on their way to the core.

        Raises:
            QueueOverflowError, MaxQueuedTokensError: the queue has no room for it.
        """
        limit = self._max_num_sequences
        if limit is not None and self._count_waiting(num_sequences, num_in_flight) > limit:
            raise QueueOverflowError(
                f"the queue is full: {self._count_waiting(0, num_in_flight)} sequences wait and {limit} may "
                f"(max_num_queued_reqs); {num_sequences} more must come later"
            )
        limit = self._max_num_tokens
        if limit is not None and self._unanswered:
            num_waiting = sum(self._unanswered.values())
            if num_waiting + num_prompt_tokens > limit:
                raise MaxQueuedTokensError(
                    f"the queue is full: {num_waiting} prompt tokens wait and {limit} may (max_num_queued_tokens); "
                    f"{num_prompt_tokens} more must come later"
                )

    def _count_waiting(self, num_more: int, num_in_flight: int) -> int:
        """Return how many sequences will wait with `num_more` of them."""
        waiting = self._stats.num_waiting
        beyond_seats = self._stats.num_running + waiting + num_in_flight + num_more - self._num_seats
        return max(waiting + num_more if waiting else 0, beyond_seats, 0)

    def add(self, request: EngineCoreRequest) -> None:
        """Take note of a request that was sent."""
        self._unanswered[request.child_ids[0]] = len(request.prompt_token_ids)

    def note_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take note of what a step brought: the first child of a family answers in the step that forks it."""
        self._stats = outputs.stats or self._stats
        for output in outputs.outputs:
            self._unanswered.pop(output.request_id, None)

    def forget(self, core_ids: Iterable[str]) -> None:
        """Take note of requests that were aborted."""
        for core_id in core_ids:
            self._unanswered.pop(core_id, None)
            self._unanswered.pop(f"0_{core_id}", None)


def _check_limit(name: str, limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise VLLMValidationError(f"{name} must be a whole number of at least 0", parameter=name, value=limit)
    return limit
