"""A decode batch: the same sequences, a position each, and nothing else; it is decided once and keeps its id."""

from collections import defaultdict

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request
from vllm.logprobs.block import count_rows
from vllm.v1.messages import SchedulerOutput

PROMPT = [1, 2, 3, 4, 5]


def make_engine(num_blocks: int = 80, **options: object) -> ScriptedEngine:
    return ScriptedEngine(make_config(**options), num_blocks)


def start(engine: ScriptedEngine, names: str = "abc", **params: object) -> None:
    """Add requests, and step until they have been a decode batch once."""
    for seed, name in enumerate(names):
        engine.add(make_request(name, PROMPT, seed=seed, **({"max_tokens": 20, "ignore_eos": True} | params)))
    engine.step()
    engine.step()


def get_id(engine: ScriptedEngine) -> int | None:
    engine.step()
    return engine.last_plan.decode_batch_id


def test_the_id_stays_while_the_same_sequences_decode_and_the_core_repeats_it() -> None:
    engine = make_engine()
    start(engine, logprobs=1)
    tables = []
    ids = set()
    for _ in range(10):
        tables.append(engine.step().decode_batch)
        ids.add(engine.last_plan.decode_batch_id)
    assert len(ids) == 1 and None not in ids
    assert {table.batch_id for table in tables} == ids
    assert all(table.request_ids == tables[0].request_ids and table.rows == tables[0].rows for table in tables)


def test_a_step_that_brings_something_else_has_no_id_or_a_new_one() -> None:
    engine = make_engine()
    start(engine)
    first = get_id(engine)
    engine.add(make_request("new", PROMPT, max_tokens=4, ignore_eos=True))
    assert get_id(engine) is None, "a prompt runs"
    second = get_id(engine)
    assert second not in (None, first)
    engine.abort("b")
    third = get_id(engine)
    assert third not in (None, first, second)
    assert engine.last_plan.left_request_ids == ["b"]
    assert get_id(engine) == third
    engine.run()


def test_a_batch_of_which_one_ends_tells_the_others_without_an_id() -> None:
    engine = make_engine()
    engine.add(make_request("short", PROMPT, max_tokens=4, ignore_eos=True))
    start(engine)
    before = get_id(engine)
    step = engine.step()
    assert engine.last_plan.decode_batch_id == before
    assert [output.request_id for output in step.outputs] == ["short"]
    assert step.decode_batch.batch_id is None and sorted(step.decode_batch.request_ids) == ["a", "b", "c"]
    assert get_id(engine) not in (None, before)


def test_a_batch_that_is_aborted_in_part_while_its_step_runs_goes_on() -> None:
    engine = make_engine()
    start(engine, logprobs=1)
    scheduler_output = engine.start_step()
    engine.abort("b")
    outputs = engine.end_step(scheduler_output, engine.runner.execute_model(scheduler_output))
    assert {output.request_id for output in outputs.list_outputs()} == {"a", "c"}
    engine.run()


def test_a_request_of_the_batch_that_fails_ends_alone() -> None:
    engine = make_engine()
    start(engine, logprobs=1)
    engine.runner.errors = {"b": "NaN"}
    outputs = engine.step()
    assert {output.request_id for output in outputs.list_outputs()} == {"a", "b", "c"}
    engine.runner.errors = {}
    engine.run()
    assert set(engine.failed) == {"b"}


def test_rows_in_blocks_of_their_own_stay_out_of_the_table_and_in_the_batch() -> None:
    engine = make_engine()
    engine.add(make_request("wide", PROMPT, max_tokens=20, ignore_eos=True, logprobs=40))
    start(engine, "ab", logprobs=1)
    ids = set()
    for _ in range(4):
        step = engine.step()
        ids.add(engine.last_plan.decode_batch_id)
        assert sorted(step.decode_batch.request_ids) == ["a", "b"]
        assert [(output.request_id, count_rows(output.full_rows)) for output in step.outputs] == [("wide", 1)]
    assert len(ids) == 1 and None not in ids
    engine.run()


@pytest.mark.parametrize("num_blocks", [6, 7, 9, 12])
def test_a_batch_that_outgrows_memory_is_decided_anew(num_blocks: int) -> None:
    """The same id means one position further; who waits for a block, or is preempted, breaks the row of steps."""
    engine = make_engine(num_blocks, block_size=4, caching=False)
    for seed, name in enumerate("abc"):
        engine.add(make_request(name, PROMPT, seed=seed, max_tokens=14, ignore_eos=True))
    by_id: dict[int, list[SchedulerOutput]] = defaultdict(list)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        if (batch_id := engine.last_plan.decode_batch_id) is not None:
            by_id[batch_id].append(engine.last_plan)
            assert len(engine.scheduler.running) <= len(engine.last_plan.num_scheduled_tokens)
    engine.check_all_ended()
    for steps in by_id.values():
        first = steps[0].running
        for number, step in enumerate(steps):
            assert step.running.request_ids == first.request_ids == list(step.num_scheduled_tokens)
            assert step.running.num_computed_tokens == [computed + number for computed in first.num_computed_tokens]
            assert not step.new_requests and not step.block_copies and not step.prompt_ranges
            assert not step.left_request_ids or number == 0


def test_a_batch_larger_than_the_budget_has_no_id() -> None:
    engine = make_engine(max_num_batched_tokens=2)
    for seed, name in enumerate("abc"):
        engine.add(make_request(name, [1], seed=seed, max_tokens=9, ignore_eos=True))
    for _ in range(6):
        engine.step()
        assert len(engine.last_plan.num_scheduled_tokens) <= 2
        if len(engine.scheduler.running) > 2:
            assert engine.last_plan.decode_batch_id is None
    engine.run()


def test_who_waits_for_a_seat_does_not_end_a_batch() -> None:
    engine = make_engine(max_num_seqs=3)
    start(engine)
    before = get_id(engine)
    engine.add(make_request("later", PROMPT, max_tokens=2, ignore_eos=True))
    assert get_id(engine) == before
    engine.run()
