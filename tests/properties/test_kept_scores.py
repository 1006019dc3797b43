"""Prompt logprobs that come with the prefix cache equal those of an engine without one, whatever was asked before."""

import random
from typing import Any

import numpy as np
import pytest

from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs

VOCAB, TOLERANCE = 512, 1e-4
SMALL_POOL = {"num_gpu_blocks_override": 14, "max_num_seqs": 6, "max_num_batched_tokens": 48}


def assert_same_scores(cold: FlatLogprobs, warm: FlatLogprobs, scale: float, where: str) -> None:
    """Compare entry by entry, order included: ids and ranks may differ only where values nearly tie.

    `scale` is how much larger the logits are than those of the model as it was made.
    """
    tolerance = TOLERANCE * max(1.0, scale)
    assert len(cold) == len(warm) and cold.num_none == warm.num_none, where
    a, b = cold.to_arrays(), warm.to_arrays()
    np.testing.assert_array_equal(a.row_starts, b.row_starts, err_msg=where)
    np.testing.assert_allclose(a.values, b.values, rtol=0, atol=tolerance, err_msg=where)
    is_chosen = np.zeros(len(a.values), np.bool_)
    is_chosen[a.row_starts[:-1][np.diff(a.row_starts) > 0]] = True
    np.testing.assert_array_equal(a.token_ids[is_chosen], b.token_ids[is_chosen], err_msg=where)
    # Far down the ranks lie so close that a chosen token there may change places with its neighbours.
    assert np.abs(a.ranks - b.ranks)[is_chosen].max(initial=0) <= 2, where
    for place in np.flatnonzero(~is_chosen & ((a.token_ids != b.token_ids) | (a.ranks != b.ranks))):
        row = int(np.searchsorted(a.row_starts, place, side="right")) - 1
        values = np.sort(a.values[a.row_starts[row] : a.row_starts[row + 1]])
        assert np.diff(values).min(initial=1.0) <= 2 * tolerance, f"{where}: row {row} differs: {values}"


def make_random_request(rng: random.Random, stems: list[list[int]], longest: int) -> tuple[dict, dict[str, Any]]:
    stem = rng.choice(stems)[:longest]
    prompt = stem[: rng.randint(2, len(stem))] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 20]))]
    params: dict[str, Any] = {"max_tokens": rng.choice([0, 0, 0, 1, 5, 60]), "temperature": 0, "ignore_eos": True}
    if rng.random() < 0.85:
        params["prompt_logprobs"] = rng.choice([0, 1, 2, 5, 20, 21, 130, -1])
        params["prompt_logprobs_start"] = rng.choice([None, None, 0, 1, len(prompt) // 2, len(prompt) - 1, len(prompt)])
        params["logprobs_mode"] = rng.choice([None, None, "raw_logits", "processed_logprobs"])
        params["n"] = rng.choice([1, 1, 3]) if params["max_tokens"] else 1
    return {"prompt_token_ids": prompt}, params


def set_weights(llm: LLM, factor: float) -> None:
    def scale(worker: Any) -> None:
        model = worker.model_runner.model
        weight = model.model.norm.weight.detach().clone() * factor
        model.load_weights([("model.norm.weight", weight)])

    llm.collective_rpc(scale)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pool", ["large", "small"])
def test_a_walk_over_scores_equals_a_cold_engine(make_llm, seed: int, pool: str) -> None:
    rng = random.Random(100 * seed + len(pool))
    cold = make_llm(enable_prefix_caching=False)
    warm = make_llm(**(SMALL_POOL if pool == "small" else {"max_num_batched_tokens": 300}))
    warm.reset_prefix_cache()
    longest = 100 if pool == "small" else 70
    stems = [[rng.randrange(3, VOCAB) for _ in range(longest)] for _ in range(2)]
    stems.append(stems[0][:37] + stems[1][37:])
    factor = 1.0
    before = warm.llm_engine.get_stats()
    for number in range(6):
        requests = [make_random_request(rng, stems, longest) for _ in range(rng.choice([1, 1, 2, 6]))]
        prompts, params = [prompt for prompt, _ in requests], [SamplingParams(**fields) for _, fields in requests]
        expected = cold.generate(prompts, params, use_tqdm=False)
        got = warm.generate(prompts, params, use_tqdm=False)
        for (prompt, fields), a, b in zip(requests, expected, got, strict=True):
            where = f"step {number}: {fields} on {len(prompt['prompt_token_ids'])} tokens"
            assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None), where
            if a.prompt_logprobs is not None:
                assert_same_scores(a.prompt_logprobs, b.prompt_logprobs, factor, where)
        if rng.random() < 0.2:
            warm.reset_prefix_cache()
        if rng.random() < 0.2:
            factor *= (step := rng.choice([0.8, 1.25]))
            set_weights(cold, step)
            set_weights(warm, step)
    set_weights(cold, 1 / factor)
    set_weights(warm, 1 / factor)
    after = warm.llm_engine.get_stats()
    assert after.num_scored_prompt_rows > before.num_scored_prompt_rows
    assert after.num_used_blocks == 0


def test_what_is_read_is_bit_for_bit_what_was_made(make_llm) -> None:
    llm = make_llm()
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": [3 + (7 * i) % 500 for i in range(60)]}
    for mode in ("raw_logprobs", "raw_logits"):
        first, again = (
            llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=k, logprobs_mode=mode))[0].prompt_logprobs
            for k in (20, 20)
        )
        for a, b in zip(first.to_arrays(), again.to_arrays(), strict=True):
            np.testing.assert_array_equal(a[: -21 * 2], b[: -21 * 2])  # the last token's row is made again


@pytest.mark.parametrize("seed", range(3))
def test_each_distinct_position_runs_once_and_no_more(make_llm, seed: int) -> None:
    """One after the other, or all at once: what runs is what a tree of the prompts has nodes, the last tokens aside."""
    rng = random.Random(seed)
    llm = make_llm(max_num_batched_tokens=300)
    stem = [rng.randrange(3, VOCAB) for _ in range(50)]
    prompts = [
        stem[: rng.randint(20, 50)] + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(8)
    ]
    nodes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt))}
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    for batches in ([prompts], [[prompt] for prompt in prompts]):
        llm.reset_prefix_cache()
        before = llm.llm_engine.get_stats()
        for batch in batches:
            llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
        after = llm.llm_engine.get_stats()
        assert after.num_computed_positions - before.num_computed_positions == len(nodes)
        owed = sum(len(prompt) - 1 for prompt in prompts)
        scored = after.num_scored_prompt_rows - before.num_scored_prompt_rows
        assert scored + after.num_cached_prompt_rows - before.num_cached_prompt_rows == owed
        assert len(nodes) <= scored <= len(nodes) + 2 * len(prompts)
