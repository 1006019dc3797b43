"""Too little memory: who goes, what is kept, what is computed again, and that somebody always gets on."""

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request


def make_engine(num_blocks: int, **options: object) -> ScriptedEngine:
    return ScriptedEngine(make_config(**({"block_size": 4, "caching": False} | options)), num_blocks)


def step_until_preemption(engine: ScriptedEngine) -> None:
    for _ in range(100):
        engine.step()
        if engine.scheduler.get_stats().num_preemptions:
            return
    raise AssertionError("nobody was preempted")


def test_the_latest_goes_and_comes_back_with_all_it_had() -> None:
    engine = make_engine(num_blocks=6)
    for name in "abc":
        engine.add(make_request(name, [1, 2, 3, 4, 5], max_tokens=12, seed=ord(name), ignore_eos=True))
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["a", "b"]  # c's blocks fit, but not what all need next
    step_until_preemption(engine)
    assert engine.last_plan.left_request_ids == ["b"]
    assert "a" in engine.last_plan.num_scheduled_tokens
    engine.run()
    assert [engine.answers[name].num_preemptions for name in "abc"] == [0, 1, 0]


def test_who_just_goes_on_is_told_of_as_a_column_and_who_comes_back_in_full() -> None:
    engine = make_engine(num_blocks=6)
    for name in "ab":
        engine.add(make_request(name, [1, 2, 3, 4, 5], max_tokens=12, seed=ord(name), ignore_eos=True))
    told: dict[str, list[int]] = {"a": [], "b": []}  # preemptions, by each output in full
    num_columns = 0
    while engine.scheduler.has_unfinished_requests():
        step = engine.step()
        for output in step.outputs:
            told[output.request_id].append(output.num_preemptions)
        num_columns += 0 if step.decode_batch is None else len(step.decode_batch.request_ids)
    assert told == {"a": [0, 0], "b": [0, 1, 1]}, "the first token, the first after a preemption, and the last"
    assert num_columns == 2 * 12 - 5


def test_who_is_last_waits_in_its_seat_rather_than_lose_what_it_has() -> None:
    """Two need a block in one step and there is one: the second waits until the first ends, and recomputes nothing."""
    engine = make_engine(num_blocks=7)
    for name in "ab":
        engine.add(make_request(name, [1, 2, 3, 4, 5], max_tokens=12, seed=ord(name), ignore_eos=True))
    engine.run()
    stats = engine.scheduler.get_stats()
    assert (stats.num_preemptions, stats.num_computed_positions) == (0, 2 * 16)


def test_priority_decides_who_goes() -> None:
    engine = make_engine(num_blocks=6, policy="priority")
    engine.add(make_request("low", [1, 2, 3, 4, 5], priority=9, max_tokens=12, ignore_eos=True))
    engine.add(make_request("high", [1, 2, 3, 4, 5], priority=0, arrival_time=5.0, max_tokens=12, ignore_eos=True))
    step_until_preemption(engine)
    assert engine.last_plan.left_request_ids == ["low"]
    engine.run()


def test_a_child_keeps_what_its_siblings_own_too_and_recomputes_only_the_rest() -> None:
    engine = make_engine(num_blocks=10)
    engine.add(
        make_request("fam", list(range(1, 18)), n=2, max_tokens=16, ignore_eos=True)
    )  # 4 full blocks and 1 token
    step_until_preemption(engine)
    (child,) = (r for r in engine.scheduler.requests.values() if r.num_preemptions)
    assert (child.request_id, len(child.block_ids), child.num_computed_tokens) == ("1_fam", 4, 16)
    while not engine.last_plan.new_requests:
        engine.step()
    (new,) = engine.last_plan.new_requests
    assert (new.request_id, new.num_computed_tokens) == ("1_fam", 16)
    engine.run()
    assert engine.runner.num_run_positions["fam"] == 17


def test_waiting_children_give_up_what_nobody_else_holds_before_anyone_who_runs_is_preempted() -> None:
    engine = make_engine(num_blocks=17, max_num_seqs=2, policy="priority")
    engine.add(make_request("first", [1, 2], max_tokens=30, ignore_eos=True, priority=0))
    engine.add(make_request("fam", list(range(1, 14)), n=3, max_tokens=2, ignore_eos=True, priority=5))
    engine.step()
    engine.add(make_request("second", [3, 4], max_tokens=30, ignore_eos=True, priority=1))  # takes the children's seat
    shared = engine.scheduler.requests["0_fam"].shared_blocks
    while "first" in engine.scheduler.requests:
        engine.step()
    assert len(shared.block_ids) == 1, "17 − 2 · 8, the end of the prompt went first"
    engine.run()
    assert engine.answers["first"].num_preemptions == engine.answers["second"].num_preemptions == 0
    assert [engine.answers[f"{i}_fam"].num_preemptions for i in range(3)] == [1, 1, 1], "what is lost counts"


def test_waiting_children_keep_what_a_running_sibling_holds_anyway() -> None:
    engine = make_engine(num_blocks=7, max_num_seqs=1)
    engine.add(
        make_request("fam", list(range(1, 15)), n=3, max_tokens=14, ignore_eos=True)
    )  # 3 full blocks and 2 tokens
    engine.step()
    shared = engine.scheduler.requests["2_fam"].shared_blocks
    while len(shared.block_ids) == 4:
        engine.step()
    assert len(shared.block_ids) == 3, "only the partial block, which no sibling shares, went"
    engine.run()
    assert engine.runner.num_run_positions["1_fam"] == 2 + 13  # the two that went with it, and its own tokens


@pytest.mark.parametrize("caching", [True, False])
def test_children_run_one_after_the_other_when_the_pool_holds_only_one(caching: bool) -> None:
    engine = make_engine(num_blocks=6, caching=caching)
    engine.add(make_request("fam", list(range(1, 15)), n=5, max_tokens=11, ignore_eos=True))  # one child needs all 6
    engine.run()


def test_the_first_in_order_gets_on_in_every_step() -> None:
    engine = make_engine(num_blocks=8)
    for i in range(6):
        engine.add(make_request(f"r{i}", [i + 1] * 5, n=2, max_tokens=25, ignore_eos=True))
    while engine.scheduler.has_unfinished_requests():
        first = engine.scheduler.running[0].request_id if engine.scheduler.running else None
        engine.step()
        assert first is None or first in engine.last_plan.num_scheduled_tokens
    engine.check_all_ended()


def test_who_is_preempted_does_not_come_back_in_the_same_step() -> None:
    engine = make_engine(num_blocks=6)
    for name in "abcd":
        engine.add(make_request(name, [1, 2, 3, 4, 5], max_tokens=12, seed=ord(name), ignore_eos=True))
    while engine.scheduler.has_unfinished_requests():
        before = engine.scheduler.get_stats().num_preemptions
        engine.step()
        if engine.scheduler.get_stats().num_preemptions > before:
            assert not engine.last_plan.new_requests
    engine.check_all_ended()
    assert engine.scheduler.get_stats().num_preemptions


def test_who_enters_gets_through_some_steps_before_anyone_must_go() -> None:
    """A pool full of sequences that grow: without blocks kept spare, each that enters is thrown out at once."""
    engine = make_engine(num_blocks=24, block_size=2, max_num_seqs=16)
    for i in range(16):
        engine.add(make_request(f"r{i}", [i + 1] * 3, max_tokens=9, ignore_eos=True))
    engine.run()
    stats = engine.scheduler.get_stats()
    assert stats.num_preemptions <= 8
    assert stats.num_computed_positions <= 1.4 * 16 * 11


def test_a_preempted_prompt_goes_on_scoring_where_it_stood() -> None:
    """All rows come once and in order, though the positions of some run twice."""
    engine = make_engine(num_blocks=20, max_num_batched_tokens=8)
    engine.add(make_request("a", list(range(1, 31)), prompt_logprobs=1, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.num_prompt_rows["a"] == 16
    engine.scheduler._preempt(engine.scheduler.running[0])
    ranges = []
    for _ in range(4):
        engine.step()
        ranges += engine.last_plan.prompt_ranges.values()
    assert ranges == [(17, 25), (25, 30)]  # 16 positions run again without a row; entry 17 is that of position 16
    engine.run()


def test_prompt_rows_already_sent_let_the_rest_read_the_cache() -> None:
    engine = make_engine(num_blocks=20, max_num_batched_tokens=8, caching=True)
    engine.add(make_request("a", list(range(1, 31)), prompt_logprobs=1, ignore_eos=True))
    engine.step()
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    assert engine.last_plan.new_requests[0].num_computed_tokens == 16
    assert engine.run().num_prompt_rows["a"] == 29


def test_a_long_recomputation_does_not_stop_those_who_decode() -> None:
    engine = make_engine(num_blocks=40, max_num_batched_tokens=8)
    engine.add(make_request("old", list(range(1, 31)), max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add(make_request("young", [1, 2], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    engine.step()
    for _ in range(4):
        engine.step()
        assert engine.last_plan.num_scheduled_tokens["young"] == 1
    engine.run()
