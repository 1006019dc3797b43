"""Steps, budgets, seats and order; how a sequence ends; what is refused; what is dropped."""

import pytest

from tests.v1.core.scripted_engine import ScriptedEngine, make_config, make_request
from vllm.exceptions import VLLMValidationError
from vllm.v1.core.sched.admission import count_positions
from vllm.v1.messages import FinishReason, PromptRange
from vllm.v1.request import Ending, Request


def make_engine(num_blocks: int = 60, **options: object) -> ScriptedEngine:
    return ScriptedEngine(make_config(**options), num_blocks)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 10, 11, 32])
def test_the_chunk_size_changes_nothing_but_the_steps(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    engine.add(make_request("a", list(range(1, 11)), prompt_logprobs=2, logprobs=1, ignore_eos=True))
    steps = 0
    while not engine.answers["a"].token_ids:
        engine.step()
        steps += 1
    assert steps == -(-10 // budget)
    engine.run()


def test_prompt_ranges_name_the_token_that_a_row_predicts() -> None:
    engine = make_engine(max_num_batched_tokens=4)
    engine.add(make_request("a", list(range(1, 11)), prompt_logprobs=0))
    ranges = []
    for _ in range(3):
        engine.step()
        ranges.append(engine.last_plan.prompt_ranges.get("a"))
    assert ranges == [PromptRange(1, 5), PromptRange(5, 9), PromptRange(9, 10)]


def test_those_who_run_go_before_those_who_wait() -> None:
    engine = make_engine(max_num_batched_tokens=10)
    engine.add(make_request("a", [1, 2, 3], ignore_eos=True))
    engine.step()
    engine.add(make_request("b", list(range(1, 21))))
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"a": 1, "b": 9}
    engine.run()


def test_no_more_run_than_there_are_seats() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, [1, 2, 3], ignore_eos=True))
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == ["a", "b"]
    assert engine.scheduler.get_stats().num_waiting == 1
    engine.run()


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "dbac")])
def test_the_policy_orders_the_queue(policy: str, order: str) -> None:
    engine = make_engine(max_num_seqs=1, policy=policy)
    for name, priority, arrival_time in (("a", 5, 2.0), ("b", 5, 1.0), ("c", 7, 0.0), ("d", 0, 9.0)):
        engine.add(make_request(name, [1], priority=priority, arrival_time=arrival_time, max_tokens=1))
    seen = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        seen += [new.request_id for new in engine.last_plan.new_requests]
    assert "".join(seen) == order


def test_without_chunking_a_prompt_waits_for_a_step_that_holds_it() -> None:
    engine = make_engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    engine.add(make_request("a", [1] * 6))
    engine.add(make_request("b", [2] * 6))
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"a": 6}
    engine.step()
    assert engine.last_plan.num_scheduled_tokens["b"] == 6
    engine.run()


def test_without_chunking_a_sequence_that_outgrew_the_budget_is_still_recomputed() -> None:
    engine = make_engine(max_num_batched_tokens=10, enable_chunked_prefill=False, caching=False)
    engine.add(make_request("a", [1] * 9, max_tokens=12, ignore_eos=True))
    for _ in range(6):
        engine.step()
    engine.scheduler.preempt_everything()
    engine.run()


def test_a_long_prompt_leaves_room_under_its_threshold() -> None:
    engine = make_engine(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    engine.add(make_request("long", [1] * 20))
    engine.add(make_request("short", [2] * 3))
    engine.step()
    assert engine.last_plan.num_scheduled_tokens == {"long": 4, "short": 3}
    engine.run()


def test_an_empty_step_is_no_harm() -> None:
    outputs = make_engine().step()
    assert outputs.outputs == [] and outputs.prompt_scores == [] and outputs.logprobs is None
    assert outputs.stats is not None and outputs.timestamp > 0


def test_nothing_asked_is_nothing_scored() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3]))
    outputs = engine.step()
    assert outputs.logprobs is None and outputs.prompt_scores == [] and not engine.last_plan.prompt_ranges
    assert outputs.outputs[0].rows is None


def test_rows_of_one_step_keep_to_what_each_request_asked() -> None:
    engine = make_engine()
    engine.add(make_request("none", [1, 2, 3]))
    engine.add(make_request("chosen", [1, 2, 3], logprobs=0))
    engine.add(make_request("top", [1, 2, 3], logprobs=5, n=2))
    engine.add(make_request("all", [1, 2, 3], logprobs=40, prompt_logprobs=40, n=2))
    engine.add(make_request("given", [1, 2, 3], logprob_token_ids=[7, 8, 9], prompt_logprobs=1))
    outputs = engine.step()  # the engine's own checks look at each row
    assert len(outputs.logprobs.split()) == 1 + 2 + 1 + 2
    assert sum(output.full_rows is not None for output in outputs.outputs) == 2
    engine.run()


def test_outputs_tell_when_their_request_first_ran() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("fam", [1, 2, 3], n=2, ignore_eos=True))
    engine.add(make_request("later", [1, 2, 3], ignore_eos=True))
    told: dict[str, set[float]] = {}
    while engine.scheduler.has_unfinished_requests():
        for output in engine.step().outputs:
            told.setdefault(output.request_id, set()).add(output.scheduled_ts)
    assert told["0_fam"] == told["1_fam"] and len(told["0_fam"]) == len(told["later"]) == 1
    assert 0 < min(told["0_fam"]) < min(told["later"])


# ---------------------------------------------------------------- score only


@pytest.mark.parametrize("length", [2, 3, 10, 64])
@pytest.mark.parametrize("budget", [4, 64])
def test_scoring_a_prompt_runs_all_but_its_last_position(length: int, budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget, max_model_len=64)
    engine.add(make_request("a", [5] * length, max_tokens=0, prompt_logprobs=1, logprobs=1))
    engine.run()
    assert engine.scheduler.get_stats().num_computed_positions == length - 1
    assert engine.answers["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("length", "prompt_logprobs"), [(1, 0), (1, None), (10, None)])
def test_nothing_to_score_is_answered_by_the_next_step_without_running(
    length: int, prompt_logprobs: int | None
) -> None:
    engine = make_engine()
    engine.add(make_request("a", [5] * length, max_tokens=0, prompt_logprobs=prompt_logprobs))
    assert engine.scheduler.has_unfinished_requests() and engine.scheduler.num_unfinished_requests() == 1
    outputs = engine.step()
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs.outputs] == [
        ("a", [], FinishReason.LENGTH)
    ]
    assert engine.scheduler.get_stats().num_computed_positions == 0
    engine.check_all_ended()


def test_nothing_to_score_can_be_aborted_before_its_answer() -> None:
    engine = make_engine()
    engine.add(make_request("a", [5], max_tokens=0))
    engine.abort("a")
    assert engine.step().outputs == []


# ---------------------------------------------------------------- endings


@pytest.mark.parametrize(
    ("tokens", "params", "ending"),
    [
        ([7], {}, None),
        ([0], {}, Ending(FinishReason.STOP)),
        ([0], {"ignore_eos": True}, None),
        ([0], {"ignore_eos": True, "stop_token_ids": [0]}, Ending(FinishReason.STOP, 0)),
        ([0], {"stop_token_ids": [0]}, Ending(FinishReason.STOP)),
        ([7], {"stop_token_ids": [8, 7]}, Ending(FinishReason.STOP, 7)),
        ([7], {"max_tokens": 1}, Ending(FinishReason.LENGTH)),
        ([0], {"max_tokens": 1}, Ending(FinishReason.STOP)),
        ([0], {"min_tokens": 2}, None),
        ([7], {"stop_token_ids": [7], "min_tokens": 2}, None),
        ([9, 7], {"stop_token_ids": [7], "min_tokens": 2}, Ending(FinishReason.STOP, 7)),
        ([9, 9], {"max_tokens": 2, "min_tokens": 2}, Ending(FinishReason.LENGTH)),
        ([9, 9], {"max_tokens": 9, "min_tokens": 9}, Ending(FinishReason.LENGTH)),  # the model's length: 3 + 2
    ],
)
def test_a_sequence_ends_for_one_reason(tokens: list[int], params: dict[str, object], ending: Ending | None) -> None:
    message = make_request("a", [1, 2, 3], **params)
    request = Request(
        message, "a", [0], (1,), num_prompt_tokens=3, max_positions=count_positions(message, 5), num_scored=3
    )
    request.output_token_ids += tokens
    assert request.find_ending() == ending


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("request_options", "parameter", "text"),
    [
        ({"prompt": []}, "prompt", "at least one token"),
        ({"prompt": [1] * 64}, "prompt", r"at most 63 tokens \(max_model_len=64\); got 64"),
        ({"prompt": [1] * 65, "max_tokens": 0, "prompt_logprobs": 1}, "prompt", "at most 64 tokens"),
        ({"prompt": [1] * 4, "max_tokens": 38}, "max_tokens", r"41 positions .* holds 40 \(10 blocks of 4\)"),
        ({"prompt": [1] * 41, "max_tokens": 1}, "prompt", "41 positions"),
        ({"prompt": [1] * 50, "max_tokens": 0, "prompt_logprobs": 1}, "prompt", "49 positions"),
    ],
)
def test_what_can_never_run_is_refused(request_options: dict[str, object], parameter: str, text: str) -> None:
    engine = make_engine(num_blocks=10, max_model_len=64)
    with pytest.raises(VLLMValidationError, match=text) as refused:
        engine.add(make_request("a", **request_options))
    assert refused.value.parameter == parameter
    assert not engine.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    "request_options",
    [
        {"prompt": [1] * 4, "max_tokens": 37},
        {"prompt": [1] * 4, "max_tokens": 37, "n": 3},
        {"prompt": [1] * 40, "max_tokens": 1},
        {"prompt": [1] * 41, "max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": [1] * 64, "max_tokens": 0},
    ],
)
def test_what_just_fits_runs_to_its_end(request_options: dict[str, object]) -> None:
    engine = make_engine(num_blocks=10, max_model_len=64)
    engine.add(make_request("a", **request_options, ignore_eos=True))
    engine.run()


def test_the_models_length_caps_what_must_fit() -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    engine.add(make_request("a", [1] * 8, max_tokens=1000, ignore_eos=True))
    engine.run()
    assert len(engine.answers["a"].token_ids) == 24


def test_without_chunking_a_prompt_larger_than_a_step_is_refused() -> None:
    engine = make_engine(max_num_batched_tokens=10, enable_chunked_prefill=False)
    with pytest.raises(VLLMValidationError, match="max_num_batched_tokens=10"):
        engine.add(make_request("a", [1] * 11))


def test_an_id_in_use_is_refused_before_and_after_the_fork() -> None:
    engine = make_engine()
    engine.add(make_request("fam", [1, 2], n=2, ignore_eos=True))
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="in use"):
            engine.add(make_request("fam", [1, 2]))
        engine.step()
    engine.run()
    engine.scheduler.add_request(make_request("fam", [1, 2]))


# ---------------------------------------------------------------- abort and errors


def test_what_a_step_made_for_an_aborted_request_is_dropped() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], logprobs=1, prompt_logprobs=1))
    engine.add(make_request("b", [1, 2, 3], logprobs=1))
    plan = engine.start_step()
    made = engine.runner.execute_model(plan)
    engine.abort("a")
    outputs = engine.end_step(plan, made)
    assert [output.request_id for output in outputs.outputs] == ["b"]
    assert outputs.prompt_scores == []
    engine.run()


def test_a_new_request_does_not_get_the_tokens_of_one_that_had_its_id() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], seed=1))
    plan = engine.start_step()
    made = engine.runner.execute_model(plan)
    engine.scheduler.abort_requests(["a"])
    engine.add(make_request("a", [4, 5, 6, 7], seed=2))
    assert engine.end_step(plan, made).outputs == []
    engine.run()


def test_an_error_for_one_that_had_the_id_does_not_end_the_new_one() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3]))
    engine.runner.errors["a"] = "NaN"
    plan = engine.start_step()
    made = engine.runner.execute_model(plan)
    engine.scheduler.abort_requests(["a"])
    engine.add(make_request("a", [4, 5, 6, 7]))
    assert engine.end_step(plan, made).outputs == []
    engine.runner.errors.clear()
    engine.run()


def test_abort_ignores_what_it_does_not_know() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3]))
    engine.abort("b", "0_a")
    engine.run()
    assert engine.answers["a"].finish_reason is not FinishReason.ABORT
    engine.abort("a")


@pytest.mark.parametrize("failing", ["fam", "1_fam"])
def test_a_family_fails_as_a_whole_with_one_answer(failing: str) -> None:
    engine = make_engine()
    engine.add(make_request("fam", [1, 2, 3], n=3, ignore_eos=True))
    engine.add(make_request("mate", [1, 2, 3], ignore_eos=True))
    engine.runner.errors[failing] = "its logits hold NaN"
    while "fam" not in engine.failed:
        outputs = engine.step()
    (error,) = (o for o in outputs.outputs if o.finish_reason is FinishReason.ERROR)
    assert (error.request_id, error.error, error.new_token_ids) == ("fam", "its logits hold NaN", [])
    assert {o.request_id for o in outputs.list_outputs()} == {"fam", "mate"}
    engine.run()
    assert engine.scheduler.get_stats().num_nan_rows == 1


def test_two_children_that_fail_in_one_step_are_one_failure() -> None:
    engine = make_engine()
    engine.add(make_request("fam", [1, 2, 3], n=3, ignore_eos=True))
    engine.step()
    engine.runner.errors |= {"0_fam": "NaN", "2_fam": "NaN"}
    engine.step()
    engine.check_all_ended()


def test_a_bad_prompt_row_fails_its_request_in_the_middle_of_prefill() -> None:
    engine = make_engine(max_num_batched_tokens=4)
    engine.add(make_request("a", list(range(1, 11)), prompt_logprobs=1))
    engine.step()
    engine.runner.errors["a"] = "NaN"
    engine.step()
    assert engine.failed == {"a": "NaN"}
    engine.check_all_ended()


def test_what_a_failed_request_computed_is_not_cached() -> None:
    engine = make_engine(block_size=4)
    engine.add(make_request("a", list(range(1, 11))))
    engine.runner.errors["a"] = "NaN"
    engine.step()
    engine.add(make_request("b", list(range(1, 11))))
    engine.run()
    assert engine.answers["b"].num_cached_tokens == 0
