"""Everything at once, at random, on pools that are much too small: what must hold after each step holds."""

import random

import pytest

from tests.v1.core.scripted_engine import VOCAB_SIZE, ScriptedEngine, make_config, make_request
from vllm.exceptions import VLLMValidationError

NUM_WALKS, NUM_STEPS = 30, 40


def make_random_engine(rng: random.Random) -> ScriptedEngine:
    block_size = rng.choice([1, 2, 3, 4, 8])
    chunked = rng.random() < 0.75
    config = make_config(
        block_size=block_size,
        max_model_len=rng.choice([24, 40]),
        caching=rng.random() < 0.6,
        max_num_seqs=rng.choice([1, 2, 3, 5, 8]),
        max_num_batched_tokens=rng.choice([1, 2, 5, 8, 16, 40]) if chunked else rng.choice([16, 40]),
        enable_chunked_prefill=chunked,
        policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
    )
    return ScriptedEngine(config, num_blocks=rng.randint(-(-16 // block_size), -(-60 // block_size)))


def make_random_params(rng: random.Random, n: int) -> dict[str, object]:
    """Return params in the form that the input processor gives them."""
    logprobs = rng.choice([None, None, 0, 2, VOCAB_SIZE])
    params = {
        "max_tokens": rng.choice([1, 2, 5, 12]) if n > 1 else rng.choice([0, 1, 2, 5, 12]),
        "logprobs": logprobs,
        "logprob_token_ids": rng.choice([None, [1, 2]]) if logprobs is None else None,
        "prompt_logprobs": rng.choice([None, None, 0, 3, VOCAB_SIZE]),
        "stop_token_ids": rng.choice([[], [5, 6]]),
        "ignore_eos": rng.random() < 0.5,
    }
    params["min_tokens"] = rng.randint(0, params["max_tokens"])
    params["skip_reading_prefix_cache"] = rng.choice([None, False, False, True])
    if params["prompt_logprobs"] is not None:
        params["prompt_logprobs_start"] = rng.choice([None, None, 1, 4, 9])
    return params


def add_random_request(engine: ScriptedEngine, rng: random.Random, request_id: str, stems: list[list[int]]) -> None:
    n = rng.choice([1, 1, 1, 2, 3, 7])
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(1, len(stem))] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
    message = make_request(
        request_id,
        prompt,
        n=n,
        seed=rng.randrange(100),
        priority=rng.randint(0, 2),
        arrival_time=rng.random(),
        cache_salt=rng.choice([None, None, "salt"]),
        **make_random_params(rng, n),
    )
    try:
        engine.add(message)
    except VLLMValidationError as refused:
        assert refused.parameter in {"prompt", "max_tokens"}
        assert request_id not in engine.scheduler.requests


def do_something(engine: ScriptedEngine, rng: random.Random, may_fail: bool, in_flight: bool = False) -> None:
    live = [child_id for child_id, answer in engine.answers.items() if answer.finish_reason is None]
    chance = rng.random()
    if chance < 0.06 and live:
        engine.abort(engine.family_of[rng.choice(live)], "nobody")
    elif chance < 0.12 and live:
        # a single child exists by its own name only after the fork
        engine.abort(*[child_id for child_id in rng.sample(live, 1) if child_id in engine.scheduler.requests])
    elif chance < 0.15:
        assert engine.scheduler.reset_prefix_cache()
    elif chance < 0.16 and not in_flight:
        engine.scheduler.preempt_everything()
        assert engine.scheduler.kv.num_used_blocks == 0
    elif chance < 0.18 and may_fail and engine.scheduler.running:
        engine.runner.errors[rng.choice(engine.scheduler.running).request_id] = "NaN"


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_every_walk_keeps_the_books_and_gives_each_request_its_script(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_random_engine(rng)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 22))] for _ in range(3)]
    may_fail = rng.random() < 0.3
    for number in range(NUM_STEPS):
        if rng.random() < 0.35:
            for extra in range(rng.randint(1, 3)):
                add_random_request(engine, rng, f"r{number}.{extra}", stems)
        do_something(engine, rng, may_fail)
        plan = engine.start_step()
        made = engine.runner.execute_model(plan)
        if rng.random() < 0.2:
            do_something(engine, rng, may_fail=False, in_flight=True)
        engine.end_step(plan, made)
    engine.run()
    stats = engine.scheduler.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(30))
def test_a_prompt_runs_once_for_all_its_children_unless_memory_forces_a_preemption(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_random_engine(rng)
    length, n = rng.randint(1, 12), rng.randint(1, 9)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    params = {"max_tokens": 3, "ignore_eos": True, "prompt_logprobs": rng.choice([None, 1])}
    engine.add(make_request("family", prompt, n=n, **params))
    engine.run()
    stats = engine.scheduler.get_stats()
    if stats.num_preemptions == 0:
        assert stats.num_computed_positions == length + 2 * n  # a child's last token is never run
        assert engine.runner.num_run_positions["family"] == length + (2 if n == 1 else 0)


def test_the_walks_go_where_they_should() -> None:
    """The walks above prove something only if forks, copies, hits and preemptions happen in them."""
    num_preemptions = num_copies = num_hits = num_known = num_late_rows = 0
    for seed in range(8):
        rng = random.Random(seed)
        engine = make_random_engine(rng)
        stems = [[rng.randrange(VOCAB_SIZE) for _ in range(18)]]
        for number in range(15):
            add_random_request(engine, rng, f"r{number}", stems)
        engine.run()
        stats = engine.scheduler.get_stats()
        num_preemptions += stats.num_preemptions
        num_hits += stats.num_prefix_hits
        num_copies += engine.runner.num_copies
        num_known += stats.num_cached_prompt_rows
        num_late_rows += engine.runner.num_late_rows
        assert stats.num_cached_prompt_rows == engine.runner.num_known_rows
        assert stats.num_scored_prompt_rows == engine.runner.num_head_rows
    assert num_preemptions > 10 and num_copies > 10 and num_hits > 20 and num_known > 20 and num_late_rows > 20
