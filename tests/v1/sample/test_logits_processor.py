"""Token rules: which cells they change, and when."""

import math

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import RuledRow, TokenRules, apply_edits, make_edits

CPU = torch.device("cpu")
VOCAB = 8


def make_rules(
    params: SamplingParams, bad_words: list[list[int]] | None = None, stop_ids: list[int] | None = None
) -> TokenRules:
    rules = TokenRules.try_make(params, bad_words or [], stop_ids or [])
    assert rules is not None
    return rules


def run_rules(*rows: tuple[TokenRules, list[int]], num_rows: int | None = None) -> list[list[float]]:
    """Apply each (rules, generated) to a row of zeros."""
    logits = torch.zeros(num_rows or len(rows), VOCAB)
    edits = make_edits([RuledRow(i, rules, np.array(ids, np.int32)) for i, (rules, ids) in enumerate(rows)], CPU)
    if edits is not None:
        apply_edits(logits, edits)
    result: list[list[float]] = logits.tolist()
    return result


def removed(row: list[float]) -> list[int]:
    return [i for i, value in enumerate(row) if value == -math.inf]


def test_a_request_without_rules_has_none() -> None:
    assert TokenRules.try_make(SamplingParams(), [], [3]) is None


def test_allowed_ids_remove_all_others_of_that_row_only() -> None:
    rules = make_rules(SamplingParams(allowed_token_ids=[2, 5, 5]))
    rows = run_rules((rules, []), num_rows=2)
    assert removed(rows[0]) == [0, 1, 3, 4, 6, 7]
    assert rows[1] == [0.0] * VOCAB


def test_min_tokens_removes_stop_ids_until_it_is_reached() -> None:
    rules = make_rules(SamplingParams(min_tokens=2, max_tokens=9), stop_ids=[0, 7])
    before, at_one, reached = run_rules((rules, []), (rules, [4]), (rules, [4, 4]))
    assert removed(before) == removed(at_one) == [0, 7]
    assert removed(reached) == []


def test_a_bad_word_of_several_tokens_is_banned_only_after_its_beginning() -> None:
    rules = make_rules(SamplingParams(), bad_words=[[3], [1, 2, 4], [2, 5]])
    alone, begun, elsewhere, too_short = run_rules((rules, []), (rules, [6, 1, 2]), (rules, [1, 2, 6]), (rules, [2]))
    assert removed(alone) == [3]
    assert removed(begun) == [3, 4, 5]
    assert removed(elsewhere) == [3]
    assert removed(too_short) == [3, 5]


def test_bias_is_added_and_does_not_bring_back_what_is_removed() -> None:
    rules = make_rules(SamplingParams(logit_bias={1: 2.5, 3: -4.0, 6: 100.0}, allowed_token_ids=[1, 3]))
    plain = make_rules(SamplingParams(logit_bias={1: -1.0}))
    both, one = run_rules((rules, []), (plain, []))
    assert both[1] == 2.5 and both[3] == -4.0 and removed(both) == [0, 2, 4, 5, 6, 7]
    assert one == [0.0, -1.0, *[0.0] * 6]
