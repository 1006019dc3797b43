"""Prompt logprobs and the prefix cache: what is read, what is made again, and who waits for whom."""

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request

PROMPT = list(range(1, 18))  # 4 full blocks of 4 and one token


def make_engine(num_blocks: int = 40, **options: object) -> ScriptedEngine:
    return ScriptedEngine(make_config(block_size=4, **options), num_blocks)


class Count:
    """What one stretch of a test ran, scored with the head, and read."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine, self.before = engine, self._read(engine)

    @staticmethod
    def _read(engine: ScriptedEngine) -> tuple[int, int, int]:
        stats = engine.scheduler.get_stats()
        return stats.num_computed_positions, stats.num_scored_prompt_rows, stats.num_cached_prompt_rows

    def take(self) -> tuple[int, int, int]:
        after = self._read(self.engine)
        counts = tuple(b - a for a, b in zip(self.before, after, strict=True))
        self.before = after
        return counts  # type: ignore[return-value]


def score(engine: ScriptedEngine, request_id: str, prompt: list[int], **params: object) -> None:
    engine.add(make_request(request_id, prompt, **({"max_tokens": 0, "prompt_logprobs": 1} | params)))


@pytest.mark.parametrize("length", [2, 4, 5, 16, 17])
def test_a_prompt_scored_again_runs_nothing_and_passes_one_row_through_the_head(length: int) -> None:
    """The last token's position never ran, so nothing says that the next prompt has the same one: its score is made."""
    engine = make_engine()
    count = Count(engine)
    score(engine, "first", PROMPT[:length])
    engine.run()
    assert count.take() == (length - 1, length - 1, 0)
    score(engine, "again", PROMPT[:length])
    engine.run()
    assert count.take() == (0, 1, length - 2)
    assert engine.answers["again"].num_cached_tokens == length - 1


def test_a_continuation_runs_its_own_tokens_and_the_first_one_is_scored_from_the_kept_state() -> None:
    engine = make_engine()
    score(engine, "first", PROMPT)
    engine.run()
    count = Count(engine)
    score(engine, "other end", [*PROMPT[:10], 30, 31, 32])
    engine.run()
    assert count.take() == (2, 3, 9)  # 30 and 31 run; 30, 31 and 32 are scored
    score(engine, "its end only", [*PROMPT[:10], 35, 36], prompt_logprobs_start=10)
    engine.run()
    assert count.take() == (1, 2, 0)


def test_more_alternatives_than_are_kept_are_made_from_the_kept_states() -> None:
    engine = make_engine()
    score(engine, "first", PROMPT)
    engine.run()
    count = Count(engine)
    score(engine, "many", PROMPT, prompt_logprobs=30)
    engine.run()
    assert count.take() == (0, 16, 0)
    score(engine, "few", PROMPT, prompt_logprobs=20)
    engine.run()
    assert count.take() == (0, 1, 15)


def test_blocks_of_who_asked_for_nothing_are_computed_again_and_the_new_ones_take_their_place() -> None:
    engine = make_engine()
    engine.add(make_request("plain", PROMPT, max_tokens=1))
    engine.run()
    count = Count(engine)
    score(engine, "first", PROMPT)
    engine.run()
    assert count.take() == (16, 16, 0)
    score(engine, "again", PROMPT)
    engine.run()
    assert count.take() == (0, 1, 15)


def test_plain_blocks_serve_up_to_the_start() -> None:
    engine = make_engine()
    engine.add(make_request("plain", PROMPT, max_tokens=1))
    engine.run()
    count = Count(engine)
    score(engine, "late", PROMPT, prompt_logprobs_start=13)
    engine.run()
    assert count.take() == (4, 4, 0)  # the state that scores token 13 is of position 12, in the fourth block


def test_tokens_before_an_earlier_start_have_states_but_no_scores() -> None:
    engine = make_engine()
    score(engine, "late", PROMPT, prompt_logprobs_start=10)
    engine.run()
    count = Count(engine)
    score(engine, "whole", PROMPT)
    engine.run()
    assert count.take() == (0, 10, 6)  # tokens 1 … 9 and the last
    score(engine, "again", PROMPT)
    engine.run()
    assert count.take() == (0, 1, 15)


@pytest.mark.parametrize("budget", [1, 3, 7, 32])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_rows_of_the_head_keep_to_a_budget_of_their_own(budget: int, num_tokens: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    score(engine, "late", PROMPT, prompt_logprobs_start=16)
    engine.run()
    score(engine, "whole", PROMPT, max_tokens=num_tokens)
    num_rows = 0
    while engine.scheduler.has_unfinished_requests():
        before = engine.runner.num_late_rows
        engine.step()
        num_rows += (made := engine.runner.num_late_rows - before)
        assert made <= budget
    assert num_rows >= 15
    engine.check_all_ended()


def test_those_that_begin_alike_wait_and_each_position_runs_once() -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=16)
    count = Count(engine)
    tails = [[20], [21, 22], [21, 23], [24, 25, 26, 27, 28], [24, 25, 26, 27, 29]]
    for i, tail in enumerate(tails):
        score(engine, f"r{i}", PROMPT + tail)
    engine.run()
    # the last token of each never runs: 17 shared, then 21 once, then 24 … 27 once
    assert count.take()[0] == 17 + 1 + 4
    assert [engine.answers[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 17, 18, 17, 21]


def test_who_waits_does_not_hold_up_others() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    score(engine, "leader", PROMPT)
    score(engine, "follower", PROMPT)
    engine.add(make_request("plain", PROMPT))
    score(engine, "other", [30, *PROMPT])
    engine.step()
    assert list(engine.last_plan.num_scheduled_tokens) == ["leader", "plain", "other"]
    engine.run()


def test_a_common_first_token_is_no_reason_to_wait() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    score(engine, "a", [1, 2, 3, 4, 5])
    score(engine, "b", [1, 9, 8, 7, 6])
    engine.step()
    assert len(engine.last_plan.num_scheduled_tokens) == 2
    engine.run()


def test_a_follower_goes_on_when_its_leader_is_aborted() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    score(engine, "leader", PROMPT)
    score(engine, "follower", PROMPT)
    engine.step()
    engine.abort("leader")
    engine.run()
    assert engine.answers["follower"].num_cached_tokens == 4


def test_eviction_forgets_scores() -> None:
    engine = make_engine(num_blocks=6)
    score(engine, "first", PROMPT)
    engine.run()
    score(engine, "other", [30, *PROMPT[1:], 30, 31, 32, 33])
    engine.run()
    count = Count(engine)
    score(engine, "again", PROMPT)
    engine.run()
    assert count.take()[0] >= 12


def test_a_reset_forgets_scores_and_partial_blocks() -> None:
    engine = make_engine()
    score(engine, "first", PROMPT[:7])
    engine.run()
    engine.scheduler.reset_prefix_cache()
    count = Count(engine)
    score(engine, "again", PROMPT[:7])
    engine.run()
    assert count.take() == (6, 6, 0)


def test_without_the_option_prompt_logprobs_read_the_cache_up_to_their_start_only() -> None:
    from vllm.config import CacheConfig, VllmConfig

    config = make_config(block_size=4)
    cache = CacheConfig(block_size=4, enable_prompt_logprobs_cache=False)
    engine = ScriptedEngine(
        VllmConfig(model_config=config.model_config, cache_config=cache, scheduler_config=config.scheduler_config), 40
    )
    count = Count(engine)
    for request_id in ("first", "again"):
        score(engine, request_id, PROMPT)
        engine.run()
        assert count.take() == (16, 16, 0)
    score(engine, "late", PROMPT, prompt_logprobs_start=13)
    engine.run()
    assert count.take() == (4, 4, 0)


def test_a_family_reads_and_keeps_scores_too() -> None:
    engine = make_engine()
    score(engine, "first", PROMPT)
    engine.run()
    count = Count(engine)
    score(engine, "family", PROMPT, n=3, max_tokens=4, ignore_eos=True)
    engine.run()
    ran, rows, known = count.take()
    assert (ran, rows, known) == (1 + 3 * 3, 1, 15)
