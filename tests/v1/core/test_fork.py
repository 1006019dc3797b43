"""From one prompt to n sequences: what is shared, what is copied, who waits and how."""

import time

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request
from vllm.v1.messages import BlockCopy, FinishReason


def make_forked(length: int, n: int, num_blocks: int = 40, **options: object) -> ScriptedEngine:
    """Return an engine whose one family has just been forked."""
    engine = ScriptedEngine(make_config(block_size=4, **options), num_blocks)
    engine.add(make_request("fam", list(range(1, length + 1)), n=n, max_tokens=6, ignore_eos=True))
    engine.step()
    return engine


def test_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    engine = make_forked(length=10, n=3)
    (shared,) = engine.scheduler.kv._idle.values()
    full, partial = shared.block_ids[:2], shared.block_ids[2]
    engine.step()
    tables = [new.block_ids for new in engine.last_plan.new_requests]
    assert [table[:2] for table in tables] == [full] * 3
    assert len({table[2] for table in tables}) == 3
    assert tables[2][2] == partial, "the last owner writes in place"
    assert engine.last_plan.block_copies == [BlockCopy(partial, tables[0][2]), BlockCopy(partial, tables[1][2])]
    assert engine.scheduler.kv.num_used_blocks == 2 + 3
    engine.run()


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_prompt_of_whole_blocks_is_forked_without_a_copy(length: int) -> None:
    engine = make_forked(length, n=5).run()
    assert engine.runner.num_copies == 0


@pytest.mark.parametrize("length", [1, 3, 5, 11])
def test_a_partial_block_is_copied_once_less_than_there_are_children(length: int) -> None:
    engine = make_forked(length, n=5).run()
    assert engine.runner.num_copies == 4


def test_a_family_of_one_goes_on_without_leaving_the_batch() -> None:
    engine = make_forked(length=10, n=1)
    assert engine.scheduler.requests.keys() == {"fam"}
    engine.step()
    assert not engine.last_plan.new_requests and not engine.last_plan.left_request_ids
    assert engine.last_plan.running.request_ids == ["fam"]
    engine.run()


def test_the_family_leaves_the_batch_when_its_children_enter() -> None:
    engine = make_forked(length=10, n=2)
    assert engine.scheduler.requests.keys() == {"0_fam", "1_fam"}
    engine.step()
    assert engine.last_plan.left_request_ids == ["fam"]
    assert [
        (new.request_id, new.seeds, new.num_computed_tokens, len(new.token_ids))
        for new in engine.last_plan.new_requests
    ] == [
        ("0_fam", [0], 10, 11),
        ("1_fam", [1], 10, 11),
    ]


def test_every_child_answers_in_the_step_of_the_fork() -> None:
    engine = ScriptedEngine(make_config(max_num_seqs=1), 40)
    engine.add(make_request("fam", [1, 2, 3], n=6, logprobs=1, ignore_eos=True))
    outputs = engine.step()
    assert [output.request_id for output in outputs.outputs] == [f"{i}_fam" for i in range(6)]
    assert all(len(answer.token_ids) == answer.num_rows == 1 for answer in engine.answers.values())
    engine.run()


def test_children_that_end_with_their_first_token_never_enter_the_batch() -> None:
    engine = ScriptedEngine(make_config(), 40)
    engine.add(make_request("fam", [1, 2, 3], n=6, max_tokens=1))
    engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    engine.check_all_ended()


def test_children_without_a_seat_hold_references_only_and_go_before_later_requests() -> None:
    engine = make_forked(length=10, n=7, max_num_seqs=2)
    engine.add(make_request("later", [1], max_tokens=1))
    engine.step()
    assert engine.scheduler.kv.num_used_blocks == 3 + 2  # the prompt's, and a copy for each of the two that run
    order = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        order += [new.request_id for new in engine.last_plan.new_requests]
    assert order == [f"{i}_fam" for i in range(2, 7)] + ["later"]


def test_a_queue_counts_the_children_of_a_family_that_waits() -> None:
    engine = ScriptedEngine(make_config(), 40)
    engine.add(make_request("fam", [1, 2, 3], n=6))
    assert engine.scheduler.get_stats().num_waiting == 6
    assert engine.scheduler.num_unfinished_requests() == 6
    engine.step()
    assert engine.scheduler.num_unfinished_requests() == 6 - sum(
        a.finish_reason is not None for a in engine.answers.values()
    )
    engine.run()


def test_abort_of_the_family_ends_children_that_run_and_children_that_wait() -> None:
    engine = make_forked(length=10, n=7, max_num_seqs=2)
    engine.step()
    engine.abort("fam")
    engine.check_all_ended()


def test_abort_of_one_child_leaves_its_siblings_what_they_share() -> None:
    engine = make_forked(length=10, n=3, max_num_seqs=2)
    engine.step()
    engine.abort("0_fam")
    engine.abort("2_fam")
    engine.run()
    assert [engine.answers[f"{i}_fam"].finish_reason for i in range(3)] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    ]


def test_prompt_rows_belong_to_the_family_and_come_once() -> None:
    engine = ScriptedEngine(make_config(max_num_batched_tokens=4), 40)
    engine.add(make_request("fam", list(range(1, 12)), n=3, prompt_logprobs=2, logprobs=0, ignore_eos=True))
    engine.run()
    assert engine.num_prompt_rows == {"fam": 10}
    assert engine.scheduler.get_stats().num_scored_prompt_rows == 10
    assert engine.scheduler.get_stats().num_scored_sample_rows == 15


def test_the_largest_family_forks_in_time_that_does_not_square() -> None:
    engine = ScriptedEngine(make_config(block_size=4, max_num_seqs=4), 200)
    scheduler = engine.scheduler
    start = time.process_time()
    scheduler.add_request(make_request("fam", list(range(1, 40)), n=16384, max_tokens=5, ignore_eos=True))
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, engine.runner.execute_model(plan))
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, engine.runner.execute_model(plan))
    scheduler.abort_requests(["fam"])
    assert time.process_time() - start < 5  # a third of a second when written; a square would be minutes
    assert not scheduler.has_unfinished_requests() and scheduler.kv.num_used_blocks == 0
