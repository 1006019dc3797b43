"""Which requests answer the pairs of one call, which of them wait for which, and what their outputs come to.

    context ──▶ one request: its last row scores the first token of every continuation (`logprob_token_ids`)
        └─ continuation of several tokens ──▶ a request behind the cached context, which scores the rest
    context with a single continuation ──▶ one request for both

Contexts that begin alike are computed one after another as far as that saves work: the first of those that share a
beginning goes ahead, the others wait for its end and find the beginning in the prefix cache.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm.entrypoints.scoring.pairs import ContextKey, ScoredPair
from vllm.entrypoints.scoring.results import ContinuationScore
from vllm.inputs import ParsedPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS, RequestOutputKind, SamplingParams

MIN_SHARED_TOKENS = 16  # a context that shares less with another does not wait for it: a step costs more

Value = tuple[float, int]  # logprob and rank of a token


class BatchedRequest(NamedTuple):
    """One request to the engine."""

    group: int  # its context's number
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    after: int | None  # the request that must have ended before it starts
    num_new_tokens: int  # that no request before it computes, as far as is known here

    def as_input(self) -> ParsedPrompt:
        """Return the form that the engine takes."""
        return ParsedPrompt(None, self.token_ids, self.cache_salt)


@dataclass(slots=True)
class _Group:
    """The continuations of one context."""

    context: ContextKey
    continuations: dict[tuple[int, ...], None] = field(default_factory=dict)  # each once
    first_values: dict[int, Value] = field(default_factory=dict)  # of first tokens
    rest_values: dict[tuple[int, ...], list[Value]] = field(default_factory=dict)  # of all tokens behind the first
    error: str | None = None


class ScoringBatch:
    """The requests of one call, in the order in which they should start."""

    def __init__(self, pairs: Iterable[ScoredPair]) -> None:
        self.pairs = list(pairs)
        groups: dict[ContextKey, _Group] = {}
        for pair in self.pairs:
            groups.setdefault(pair.context, _Group(pair.context)).continuations[pair.token_ids] = None
        # Neighbours in this order share the longest beginnings: what one leaves in the cache, the next one finds.
        self._groups = [groups[key] for key in sorted(groups)]
        self._group_of_context = {group.context: group for group in self._groups}
        self.requests: list[BatchedRequest] = []
        self._continuation_of: dict[int, tuple[int, ...]] = {}  # request → the continuation that it scores
        leads: list[int] = []  # group → its first request
        for number, (leader, num_shared) in enumerate(find_leaders([group.context for group in self._groups])):
            leads.append(len(self.requests))
            self._add_group(number, None if leader is None else leads[leader], num_shared)

    def _add_group(self, number: int, after: int | None, num_shared: int) -> None:
        group = self._groups[number]
        num_new = len(group.context.token_ids) - num_shared
        if len(group.continuations) == 1:
            self._add_continuation(number, next(iter(group.continuations)), after, num_new, scores_first=True)
            return
        first_ids = list(dict.fromkeys(token_ids[0] for token_ids in group.continuations))
        for start in range(0, len(first_ids), MAX_LOGPROB_TOKEN_IDS):
            params = _make_params(
                max_tokens=1,
                logprob_token_ids=first_ids[start : start + MAX_LOGPROB_TOKEN_IDS],
                # No row is scored; but prompt_logprobs makes it share blocks that are not full with others.
                prompt_logprobs=0,
                prompt_logprobs_start=len(group.context.token_ids),
            )
            self._add(number, list(group.context.token_ids), params, after, num_new)
            if start == 0:
                after, num_new = len(self.requests) - 1, 1
        for token_ids in group.continuations:
            if len(token_ids) > 1:
                self._add_continuation(number, token_ids, after, 0, scores_first=False)

    def _add_continuation(
        self, number: int, token_ids: tuple[int, ...], after: int | None, num_new: int, *, scores_first: bool
    ) -> None:
        context_ids = self._groups[number].context.token_ids
        params = _make_params(
            max_tokens=0,
            prompt_logprobs=0,
            prompt_logprobs_start=len(context_ids) + (not scores_first),
        )
        self._continuation_of[len(self.requests)] = token_ids
        self._add(number, [*context_ids, *token_ids], params, after, num_new + len(token_ids) - 1)

    def _add(self, number: int, token_ids: list[int], params: SamplingParams, after: int | None, num_new: int) -> None:
        salt = self._groups[number].context.cache_salt or None
        self.requests.append(BatchedRequest(number, token_ids, params, salt, after, num_new))

    # ------------------------------------------------------------ outputs

    def take(self, index: int, output: RequestOutput) -> None:
        """Keep what request `index` has found."""
        group = self._groups[self.requests[index].group]
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            group.error = f"{completion.stop_reason or 'the logits are no numbers'}"
            return
        token_ids = self._continuation_of.get(index)
        if token_ids is None:
            logprobs: Any = completion.logprobs
            ids, values, ranks = logprobs.row_values(0)
            found = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
            group.first_values.update((token_id, (value, rank)) for token_id, value, rank in found)
            return
        if len(group.continuations) == 1:
            first, *rest = _read_last_values(output.prompt_logprobs, len(token_ids))
            group.first_values[token_ids[0]] = first
        else:
            rest = _read_last_values(output.prompt_logprobs, len(token_ids) - 1)
        group.rest_values[token_ids] = rest

    def has_failed(self, index: int) -> bool:
        """Say whether request `index` needs not run, since its context has failed."""
        return self._groups[self.requests[index].group].error is not None

    def make_scores(self) -> list[ContinuationScore]:
        """Return the scores of all pairs, in the order of the pairs."""
        return [self._make_score(pair) for pair in self.pairs]

    def _make_score(self, pair: ScoredPair) -> ContinuationScore:
        group = self._group_of_context[pair.context]
        if group.error is None:
            values = [group.first_values[pair.token_ids[0]], *group.rest_values.get(pair.token_ids, ())]
        else:
            values = [(math.nan, 0)] * len(pair.token_ids)
        assert len(values) == len(pair.token_ids), "each token has its value"
        return ContinuationScore(
            token_ids=list(pair.token_ids),
            logprobs=[value for value, _ in values],
            ranks=[rank for _, rank in values],
            num_bytes=pair.num_bytes,
            num_context_tokens=len(pair.context.token_ids),
            num_cut_context_tokens=pair.num_cut_context_tokens,
            num_cut_tokens=pair.num_cut_tokens,
            error=group.error,
        )

    def count_tokens(self) -> int:
        """Return the tokens of the call: each context once, and its continuations."""
        return sum(len(group.context.token_ids) + sum(map(len, group.continuations)) for group in self._groups)


class Dispatcher:
    """Chooses which requests of a batch may start: those that wait for none, and no more contexts than the cache holds.

    A context whose continuations still run must not be evicted from the cache by others: `max_open_tokens` bounds
    what is open, though one is always.
    """

    def __init__(self, batch: ScoringBatch, max_open_tokens: int, max_open_requests: int) -> None:
        self._batch = batch
        self._max_open_tokens = max_open_tokens
        self._max_open_requests = max_open_requests
        self._next = 0  # the first request that was not considered yet
        self._waiting: dict[int, list[int]] = defaultdict(list)  # request → those that wait for its end
        self._ended: set[int] = set()
        self._open_tokens: dict[int, int] = {}  # of requests that were considered and have not ended
        self._num_open_tokens = 0

    @property
    def is_done(self) -> bool:
        return len(self._ended) == len(self._batch.requests)

    def take_ready(self) -> list[int]:
        """Return the requests that may start now and were not returned before."""
        requests = self._batch.requests
        ready = []
        while self._next < len(requests):
            request = requests[self._next]
            is_first_of_context = self._next == 0 or requests[self._next - 1].group != request.group
            if is_first_of_context and self._open_tokens and not self._has_room(request):
                break
            self._open_tokens[self._next] = request.num_new_tokens
            self._num_open_tokens += request.num_new_tokens
            if request.after is None or request.after in self._ended:
                ready.append(self._next)
            else:
                self._waiting[request.after].append(self._next)
            self._next += 1
        return ready

    def end(self, index: int) -> list[int]:
        """Record the end of a request and return those that it lets start; none of a context that has failed."""
        ready: list[int] = []
        ended = [index]
        while ended:
            index = ended.pop()
            self._ended.add(index)
            self._num_open_tokens -= self._open_tokens.pop(index)
            for waiting in self._waiting.pop(index, ()):
                (ended if self._batch.has_failed(waiting) else ready).append(waiting)
        return ready

    def _has_room(self, request: BatchedRequest) -> bool:
        has_tokens = self._num_open_tokens + request.num_new_tokens <= self._max_open_tokens
        return has_tokens and len(self._open_tokens) < self._max_open_requests


def find_leaders(contexts: Sequence[ContextKey]) -> list[tuple[int | None, int]]:
    """Return for each of the sorted contexts which earlier one it waits for, and how many tokens the two share.

    Of all that share as long a beginning with it, that is the first one; it shares enough to be waited for.
    """
    leaders: list[tuple[int | None, int]] = []
    path: list[tuple[int, int]] = []  # (length, first context that begins so) of the beginnings of the last context
    previous: np.ndarray | None = None
    for index, context in enumerate(contexts):
        token_ids = np.asarray(context.token_ids, np.int64)
        num_shared = 0
        if previous is not None and contexts[index - 1].cache_salt == context.cache_salt:
            num_shared = _count_shared(previous, token_ids)
        first = index - 1
        while path and path[-1][0] > num_shared:
            first = path.pop()[1]
        if num_shared and not (path and path[-1][0] == num_shared):
            path.append((num_shared, first))
        leader, covered = None, 0
        for length, candidate in path:
            if length - covered >= MIN_SHARED_TOKENS:
                leader, covered = candidate, length
        leaders.append((leader, covered))
        previous = token_ids
    return leaders


def _count_shared(one: np.ndarray, other: np.ndarray) -> int:
    num_both = min(len(one), len(other))
    differs = one[:num_both] != other[:num_both]
    return int(differs.argmax()) if differs.any() else num_both


def _make_params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        logprobs_mode="raw_logprobs",
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **fields,
    )


def _read_last_values(scores: Any, num_rows: int) -> list[Value]:
    """Return the chosen tokens' values at the last `num_rows` positions of a prompt."""
    arrays = scores.take_rows(len(scores) - num_rows, len(scores)).to_arrays()
    firsts = arrays.row_starts[:-1]
    return list(zip(arrays.values[firsts].tolist(), arrays.ranks[firsts].tolist(), strict=True))
