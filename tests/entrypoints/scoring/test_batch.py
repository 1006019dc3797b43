"""Which requests a call becomes, and which wait for which."""

import random

import pytest

from vllm.entrypoints.scoring.batch import MIN_SHARED_TOKENS, Dispatcher, ScoringBatch, find_leaders
from vllm.entrypoints.scoring.pairs import ContextKey, ScoredPair


def make_keys(*contexts: list[int], salt: str = "") -> list[ContextKey]:
    return sorted(ContextKey(salt, tuple(context)) for context in contexts)


def test_the_first_of_those_that_begin_alike_goes_ahead() -> None:
    shared = list(range(20))
    keys = make_keys([*shared, 1], [*shared, 2], [*shared, 3], [90, 91])
    assert find_leaders(keys) == [(None, 0), (0, 20), (0, 20), (None, 0)]


def test_a_few_tokens_more_are_not_waited_for() -> None:
    shared, few = list(range(20)), [50] * 3
    keys = make_keys([*shared, 1], [*shared, *few, 2], [*shared, *few, 3])
    assert find_leaders(keys) == [(None, 0), (0, 20), (0, 20)]


def test_beginnings_of_beginnings() -> None:
    shared, more = list(range(20)), [50] * MIN_SHARED_TOKENS
    keys = make_keys([*shared, 1], [*shared, *more, 2], [*shared, *more, 3], [*shared, 60])
    assert find_leaders(keys) == [(None, 0), (0, 20), (1, 20 + MIN_SHARED_TOKENS), (0, 20)]


def test_salts_share_nothing() -> None:
    shared = list(range(20))
    keys = make_keys([*shared, 1], salt="a") + make_keys([*shared, 1], salt="b")
    assert find_leaders(keys) == [(None, 0), (None, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_comes_before_and_shares_what_is_said(seed: int) -> None:
    rng = random.Random(seed)
    keys = make_keys(*([rng.randrange(2) for _ in range(rng.randrange(1, 60))] * 2 for _ in range(30)))
    for index, (leader, num_shared) in enumerate(find_leaders(keys)):
        if leader is None:
            assert num_shared == 0
            continue
        assert leader < index and num_shared >= MIN_SHARED_TOKENS
        assert keys[leader].token_ids[:num_shared] == keys[index].token_ids[:num_shared]
        longest = max(
            sum(1 for _ in _common(keys[index].token_ids, keys[earlier].token_ids)) for earlier in range(index)
        )
        assert num_shared > longest - MIN_SHARED_TOKENS


def _common(one: tuple[int, ...], other: tuple[int, ...]):
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def make_batch(num_contexts: int, length: int) -> ScoringBatch:
    keys = [ContextKey("", (i, *range(100, 100 + length - 1))) for i in range(num_contexts)]
    return ScoringBatch([ScoredPair(key, ids, None) for key in keys for ids in ((1,), (2, 3), (4, 5, 6))])


def test_a_dispatcher_starts_each_request_once_and_after_what_it_waits_for() -> None:
    batch = make_batch(10, 20)
    dispatcher = Dispatcher(batch, max_open_tokens=70, max_open_requests=100)
    running = dispatcher.take_ready()
    started, most = list(running), 0
    while not dispatcher.is_done:
        most = max(most, sum(batch.requests[i].num_new_tokens for i in running))
        ended = running.pop(0)
        new = [*dispatcher.end(ended), *dispatcher.take_ready()]
        for index in new:
            assert batch.requests[index].after in (None, *started) and batch.requests[index].after not in running
        started += new
        running += new
    assert sorted(started) == list(range(len(batch.requests))) and not running
    assert most <= 70


def test_a_context_larger_than_the_bound_still_runs() -> None:
    batch = make_batch(2, 50)
    dispatcher = Dispatcher(batch, max_open_tokens=10, max_open_requests=1)
    assert dispatcher.take_ready() == [0]
