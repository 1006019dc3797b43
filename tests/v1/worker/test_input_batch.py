"""The persistent batch against a dictionary of what each request holds."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from tests.v1.worker.steps import make_request
from vllm.v1.messages import NewRequest
from vllm.v1.sample.ops.logprobs import RowKind
from vllm.v1.worker.gpu_input_batch import InputBatch

MAX_REQS = 4


def make_batch() -> InputBatch:
    return InputBatch(max_num_reqs=MAX_REQS, max_model_len=16, block_size=2, vocab_size=50)


def make_any(number: int, rng: np.random.Generator) -> NewRequest:
    greedy = number % 2 == 0
    return make_request(
        f"r{number}",
        rng.integers(0, 50, rng.integers(1, 8)).tolist(),
        block_ids=rng.integers(0, 99, rng.integers(0, 5)).tolist(),
        num_computed_tokens=int(rng.integers(0, 3)),
        seeds=[number * 7] if number % 3 else [number, number + 1],
        temperature=0.0 if greedy else 0.5 + number % 9 / 8,
        top_k=number % 5,
        logprobs=number % 4 or None,
        prompt_logprobs=number % 3 or None,
        logprob_token_ids=[number % 50] if number % 7 == 0 else None,
        allowed_token_ids=[1] if number % 5 == 0 else None,
        max_tokens=number % 11,
    )


def check(batch: InputBatch, expected: dict[str, tuple[NewRequest, list[int], list[int]]]) -> None:
    assert set(batch.row_of) == set(expected)
    assert sorted(batch.row_of.values()) == list(range(batch.num_reqs))
    asks = [new.sampling_params.prompt_logprobs is not None for new, _, _ in expected.values()]
    assert batch.num_with_prompt_scores == sum(asks)
    for request_id, (new, token_ids, block_ids) in expected.items():
        row, params = batch.row_of[request_id], new.sampling_params
        assert batch.requests[row].request_id == request_id
        assert batch.get_sequence(row).tolist() == token_ids
        assert batch.get_generated(row).tolist() == token_ids[new.num_prompt_tokens :]
        assert batch.block_table.block_ids[row, : batch.block_table.num_blocks[row]].tolist() == block_ids
        assert batch.num_computed[row] == new.num_computed_tokens
        assert batch.requests[row].seeds.tolist() == new.seeds
        assert batch.first_seed[row] == new.seeds[0] and batch.num_draws[row] == len(new.seeds)
        assert batch.is_never_sampled[row] == (params.max_tokens == 0)
        assert batch.temperature[row] == (params.temperature or 1.0)
        assert batch.has_rules[row] == (params.allowed_token_ids is not None)
        has_given = params.logprob_token_ids is not None
        assert (batch.requests[row].given_ids is not None) == has_given
        expected_kind = RowKind.GIVEN if has_given else RowKind.TOP if params.logprobs else RowKind.NONE
        assert batch.score_kind[row] == expected_kind


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 99), max_size=25), st.integers(0, 1000))
def test_any_coming_and_going_leaves_each_request_with_its_own(choices: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = make_batch()
    expected: dict[str, tuple[NewRequest, list[int], list[int]]] = {}
    for number, choice in enumerate(choices, start=1):
        ids = sorted(expected)
        if choice % 3 == 0 and len(ids) < MAX_REQS:
            new = make_any(number, rng)
            batch.add(new)
            expected[new.request_id] = (new, list(new.token_ids), list(new.block_ids))
        elif choice % 3 == 1 and ids:
            left = ids[choice % len(ids)]
            batch.remove(left)
            del expected[left]
        elif ids:
            grown = ids[choice % len(ids)]
            _, token_ids, block_ids = expected[grown]
            if len(token_ids) < 16 and len(block_ids) < 8:
                batch.append_tokens(np.array([batch.row_of[grown]]), np.array([choice % 50]))
                batch.block_table.append(batch.row_of[grown], [choice])
                token_ids.append(choice % 50)
                block_ids.append(choice)
        check(batch, expected)


def test_a_request_that_comes_again_takes_the_place_of_its_old_self() -> None:
    batch = make_batch()
    batch.add(make_request("a", [1, 2, 3], block_ids=[5]))
    batch.add(make_request("b", [4]))
    batch.add(make_request("a", [9, 9], block_ids=[6, 7], temperature=1.0))
    assert batch.num_reqs == 2
    row = batch.row_of["a"]
    assert batch.get_sequence(row).tolist() == [9, 9] and not batch.is_greedy[row]
    assert batch.get_sequence(batch.row_of["b"]).tolist() == [4]


def test_greedy_rows_ask_for_no_filter() -> None:
    batch = make_batch()
    batch.add(make_request("a", [1], temperature=0.0, top_k=3, top_p=0.5, min_p=0.1))
    batch.add(make_request("b", [1], temperature=1.0, top_k=0))
    batch.add(make_request("c", [1], temperature=1.0, top_k=50))
    batch.add(make_request("d", [1], temperature=1.0, top_k=49))
    assert batch.has_filters[:4].tolist() == [False, False, False, True]


def test_an_end_token_beyond_the_vocabulary_is_no_cell_of_the_logits() -> None:
    batch = make_batch()
    batch.add(make_request("a", [1], min_tokens=2, stop_ids=[3, 50, 77]))
    rules = batch.requests[0].rules
    assert rules is not None and rules.min_tokens_stop_ids == [3]
