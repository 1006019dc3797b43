"""What may be read from the cache, and what may be put there."""

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request

PROMPT = list(range(1, 18))  # 4 full blocks of 4 and one token


def make_engine(**options: object) -> ScriptedEngine:
    return ScriptedEngine(make_config(block_size=4, **options), num_blocks=30)


def answer_cached(engine: ScriptedEngine, request_id: str, prompt: list[int], **options: object) -> int:
    """Run one request to its end and return how many of its prompt's tokens came from the cache."""
    engine.add(make_request(request_id, prompt, **options))
    engine.run()
    return engine.answers[engine.messages[request_id].child_ids[0]].num_cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(17, 16), (16, 12), (13, 12), (4, 0), (1, 0)])
def test_the_last_prompt_token_always_runs(length: int, cached: int) -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT)
    assert answer_cached(engine, "again", PROMPT[:length]) == cached


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = make_engine()
    answer_cached(engine, "turn", PROMPT, max_tokens=8, ignore_eos=True)
    conversation = PROMPT + engine.answers["turn"].token_ids
    assert answer_cached(engine, "next turn", conversation + [3]) == 24  # of 24 computed: the 25th token was never run


def test_what_a_running_request_has_generated_is_found_by_who_enters() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
    for _ in range(12):
        engine.step()
    assert engine.scheduler.requests["a"].num_computed_tokens == 28
    engine.add(make_request("b", PROMPT + engine.answers["a"].token_ids[:12]))
    engine.step()
    assert engine.answers["b"].num_cached_tokens == 28
    engine.run()


def test_equal_blocks_after_different_beginnings_are_not_the_same() -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT)
    assert answer_cached(engine, "other", [30, *PROMPT[1:]]) == 0


@pytest.mark.parametrize("salts", [(None, "a"), ("a", None), ("a", "b"), (None, "")])
def test_a_salt_keeps_prefixes_apart(salts: tuple[str | None, str | None]) -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT, cache_salt=salts[0])
    assert answer_cached(engine, "other salt", PROMPT, cache_salt=salts[1]) == 0
    assert answer_cached(engine, "same salt", PROMPT, cache_salt=salts[0]) == 16


def test_without_caching_nothing_is_found_and_nothing_counted() -> None:
    engine = make_engine(caching=False)
    answer_cached(engine, "first", PROMPT)
    assert answer_cached(engine, "again", PROMPT) == 0
    assert engine.scheduler.get_stats().num_prefix_queries == 0


def test_queries_and_hits_count_tokens() -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT)
    answer_cached(engine, "again", PROMPT, n=3)
    stats = engine.scheduler.get_stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (34, 16)


def test_the_family_tells_its_children_what_its_prompt_found() -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT)
    engine.add(make_request("family", PROMPT, n=3))
    engine.run()
    assert [engine.answers[f"{i}_family"].num_cached_tokens for i in range(3)] == [16, 16, 16]


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0, "max_tokens": 0}])
def test_who_skips_the_cache_fills_it(params: dict[str, object]) -> None:
    engine = make_engine()
    answer_cached(engine, "first", PROMPT)
    engine.scheduler.reset_prefix_cache()
    options = {"skip_reading_prefix_cache": True} | params
    assert answer_cached(engine, "skips", PROMPT, **options) == 0
    assert answer_cached(engine, "skips again", PROMPT, **options) == 0
    assert answer_cached(engine, "reads", PROMPT) == 16


def test_only_what_has_been_computed_can_be_found() -> None:
    """Two with one prompt in one step: nothing of the first is there yet for the second to read."""
    engine = make_engine(max_num_batched_tokens=40)
    engine.add(make_request("a", PROMPT))
    engine.add(make_request("b", PROMPT))
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"a": 17, "b": 17}
    engine.run()


def test_a_chunk_in_flight_is_not_found_before_it_has_run() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.add(make_request("a", PROMPT))
    engine.step()
    engine.add(make_request("b", PROMPT))
    engine.step()
    (new,) = engine.last_plan.new_requests
    assert (new.request_id, new.num_computed_tokens) == ("b", 8)
    engine.run()


def test_a_reset_holds_for_what_runs_on() -> None:
    """New weights came while `a` ran: what it computes from then on stands on old KV and must not be found."""
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=30, ignore_eos=True))
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    for _ in range(12):
        engine.step()
    engine.add(make_request("b", PROMPT))
    engine.step()
    assert engine.answers["b"].num_cached_tokens == 0
    engine.add(make_request("c", PROMPT + engine.answers["a"].token_ids[:10]))
    engine.step()
    assert engine.answers["c"].num_cached_tokens == 16  # of b, which started after the reset, and nothing of a
    engine.run()


def test_children_of_an_old_prompt_stay_out_of_the_new_cache() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("family", PROMPT, n=2, max_tokens=12, ignore_eos=True))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert answer_cached(engine, "new", PROMPT, max_tokens=1) == 0
    for child_id in ("0_family", "1_family"):
        assert answer_cached(engine, f"after {child_id}", PROMPT + engine.answers[child_id].token_ids[:8] + [1]) == 16


def test_a_request_that_starts_again_fills_the_new_cache() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=10, ignore_eos=True))
    engine.step()
    engine.scheduler.preempt_everything()  # forgets all prefixes too
    engine.run()
    assert answer_cached(engine, "b", PROMPT) == 16


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=10, ignore_eos=True))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"a": 2}
    assert engine.last_plan.left_request_ids == ["a"]
    assert engine.run().answers["a"].num_cached_tokens == 0  # what its first entry found


def test_a_preempted_request_finds_what_it_generated() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"a": 3}  # of 27 tokens, 26 computed: six blocks of 4 are found
    engine.run()


def test_blocks_computed_again_after_eviction_are_cached_again() -> None:
    engine = make_engine()
    engine.add(make_request("a", PROMPT, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    pool = engine.scheduler.kv.pool
    pool.release(pool.take(pool.num_blocks))  # evicts everything
    for _ in range(3):
        engine.step()
    assert engine.scheduler.requests["a"].num_computed_tokens >= 17
    assert answer_cached(engine, "b", PROMPT) == 16
