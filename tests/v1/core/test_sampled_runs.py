"""A draw may bring a run of several tokens: each counts, up to the first one that ends its sequence."""

import random

import pytest

from tests.v1.core.scripted_engine import EOS, ScriptedEngine, draw, extend_marks, make_config, make_request
from vllm.logprobs.block import count_rows
from vllm.v1.messages import FinishReason

PROMPT = list(range(1, 8))


def make_engine(*run_lengths: int, num_blocks: int = 60, **options: object) -> ScriptedEngine:
    engine = ScriptedEngine(make_config(**options), num_blocks)
    engine.runner.run_lengths = list(run_lengths)
    return engine


def tell(seed: int, length: int) -> list[int]:
    """Return the first tokens of the script after the prompt."""
    tokens: list[int] = []
    marks: list[int] = []
    for _ in range(length):
        extend_marks(marks, PROMPT + tokens)
        tokens.append(draw(seed, marks[-1]))
    return tokens


def find_seed(place: int, token_id: int) -> int:
    """Return a seed whose token at `place` is the first to be `token_id`."""
    return next(seed for seed in range(10_000) if [*tell(seed, place + 1), token_id].index(token_id) == place)


@pytest.mark.parametrize("lengths", [(2,), (5,), (1, 3), (3, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"logprobs": 3}, {"logprobs": 40}, {"prompt_logprobs": 1}], ids=str)
def test_runs_bring_what_single_tokens_bring(lengths: tuple[int, ...], options: dict[str, int]) -> None:
    """The engine's own checks look at each token, row and block table."""
    engine = make_engine(*lengths)
    for seed, name in enumerate("abc"):
        engine.add(make_request(name, PROMPT, seed=seed, max_tokens=11, ignore_eos=True, **options))
    engine.add(make_request("fam", PROMPT, n=3, seed=9, max_tokens=11, ignore_eos=True, **options))
    engine.run()


def test_a_run_of_several_tokens_leaves_as_many_positions_to_the_next_step() -> None:
    engine = make_engine(3, 1)
    engine.add(make_request("a", PROMPT, max_tokens=12, ignore_eos=True))
    counts = []
    for _ in range(4):
        engine.step()
        counts.append(engine.last_plan.num_scheduled_tokens["a"])
        (request,) = engine.scheduler.running
        assert request.num_computed_tokens == sum(counts), "what has not run is not computed"
    assert counts == [7, 3, 1, 3]
    assert engine.runner.num_run_positions["a"] == request.num_computed_tokens
    engine.run()


@pytest.mark.parametrize("num_top", [2, 40], ids=["rows of the step", "a block of its own"])
def test_tokens_and_rows_behind_a_stop_inside_a_run_are_dropped(num_top: int) -> None:
    seed = find_seed(place=4, token_id=17)
    engine = make_engine(3)
    engine.add(
        make_request("a", PROMPT, seed=seed, stop_token_ids=[17], max_tokens=20, ignore_eos=True, logprobs=num_top)
    )
    engine.step()
    outputs = engine.step().outputs
    assert [(output.new_token_ids, output.finish_reason, output.stop_reason) for output in outputs] == [
        (tell(seed, 5)[3:], FinishReason.STOP, 17)
    ]
    num_rows = count_rows(outputs[0].full_rows) if num_top == 40 else len(range(*outputs[0].rows))
    assert num_rows == 2
    engine.check_all_ended()


def test_the_end_token_inside_a_run_ends_it_unless_min_tokens_hold_it_back() -> None:
    seed = find_seed(place=1, token_id=EOS)
    for min_tokens, num_kept in ((0, 2), (3, None)):
        engine = make_engine(4)
        engine.add(make_request("a", PROMPT, seed=seed, max_tokens=30, min_tokens=min_tokens))
        (output,) = engine.step().outputs
        assert len(output.new_token_ids) == (4 if num_kept is None else num_kept)
        assert output.finish_reason is (None if num_kept is None else FinishReason.STOP)
        engine.run()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_max_tokens_cut_a_run(max_tokens: int) -> None:
    engine = make_engine(3)
    engine.add(make_request("a", PROMPT, max_tokens=max_tokens, ignore_eos=True, logprobs=0))
    engine.run()
    assert (len(engine.answers["a"].token_ids), engine.answers["a"].num_rows) == (max_tokens, max_tokens)


def test_the_models_length_cuts_a_run() -> None:
    engine = make_engine(4, max_model_len=len(PROMPT) + 6)
    engine.add(make_request("a", PROMPT, max_tokens=50, ignore_eos=True))
    engine.run()
    assert len(engine.answers["a"].token_ids) == 6


def test_draws_of_a_family_may_be_runs_of_different_lengths() -> None:
    """One child ends inside its first run, one with it, one goes on."""
    engine = make_engine(1, 3, 4)
    engine.add(make_request("fam", PROMPT, n=3, max_tokens=3, ignore_eos=True, logprobs=2))
    outputs = engine.step().outputs
    assert [(len(o.new_token_ids), o.rows.end - o.rows.first, o.finish_reason) for o in outputs] == [
        (1, 1, None),
        (3, 3, FinishReason.LENGTH),
        (3, 3, FinishReason.LENGTH),
    ]
    assert outputs[0].rows.end == outputs[1].rows.first and outputs[2].rows.first == outputs[1].rows.end
    engine.run()


def test_a_run_among_single_tokens_ends_the_decode_batch_and_loses_nothing() -> None:
    engine = make_engine(1)
    for seed, name in enumerate("abc"):
        engine.add(make_request(name, PROMPT, seed=seed, max_tokens=12, ignore_eos=True, logprobs=1))
    for _ in range(3):
        engine.step()
    before = engine.last_plan.decode_batch_id
    assert before is not None
    engine.runner.run_lengths = [1, 2, 1]
    step = engine.step()
    assert engine.last_plan.decode_batch_id == before and step.decode_batch is None
    assert sorted(len(output.new_token_ids) for output in step.outputs) == [1, 1, 2]
    engine.step()
    assert engine.last_plan.decode_batch_id is None, "one of them has two positions to run"
    engine.run()


def test_runs_survive_preemption_forks_and_aborts() -> None:
    draws = random.Random(3)
    for _ in range(30):
        engine = make_engine(*(draws.choice([1, 1, 2, 4]) for _ in range(7)), num_blocks=draws.randint(10, 16))
        for number in range(draws.randint(2, 6)):
            engine.add(
                make_request(
                    f"r{number}",
                    [draws.randrange(1, 40) for _ in range(draws.randint(1, 12))],
                    n=draws.choice([1, 1, 3]),
                    seed=draws.randrange(1000),
                    max_tokens=draws.randint(1, 20),
                    logprobs=draws.choice([None, 0, 3, 40]),
                    prompt_logprobs=draws.choice([None, 2]),
                )
            )
            for _ in range(draws.randint(0, 3)):
                engine.step()
            if draws.random() < 0.2:
                engine.abort(f"r{number}")
        engine.run()
