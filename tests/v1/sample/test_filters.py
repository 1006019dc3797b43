"""Top-k, top-p and min-p against float64: which tokens stay, ties included."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.v1.sample.reference import count_kept, falling_order
from vllm.v1.sample.ops.topk_topp_sampler import apply_filters

# Sums that differ by less decide a top-p border either way: weights are float32, the reference's float64.
TOLERANCE = 1e-6


class Row:
    """A row that asks."""

    def __init__(
        self, logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> None:
        self.logits = np.array(logits, np.float32)
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p

    def __repr__(self) -> str:
        return f"{self.logits.tolist()} t={self.temperature} k={self.top_k} p={self.top_p} min_p={self.min_p}"


def run_filters(rows: list[Row]) -> list[np.ndarray]:
    """Filter all rows in one call and return which ids stay, in id order."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows]))
    vocab_size = logits.shape[1]
    apply_filters(
        logits,
        np.arange(len(rows)),
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([row.top_k or vocab_size for row in rows]),
        torch.tensor([row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
    )
    return [np.flatnonzero(row.numpy() > -np.inf) for row in logits]


def check_kept(row: Row, kept: np.ndarray) -> None:
    bounds = [
        count_kept(
            row.logits,
            row.temperature,
            row.top_k,
            min(1.0, max(1e-9, row.top_p + shift)),
            max(0, row.min_p + min_shift),
        )
        if row.top_p < 1
        else count_kept(row.logits, row.temperature, row.top_k, 1.0, max(0, row.min_p + min_shift))
        for shift in (-TOLERANCE, TOLERANCE)
        for min_shift in ((-TOLERANCE, TOLERANCE) if row.min_p > 0 else (0.0,))
    ]
    order = falling_order(row.logits)
    finite = row.logits > -np.inf
    expected = order[: len(kept)]
    assert sorted(expected) == kept.tolist(), f"{row}: what stays is not a prefix of the falling order"
    assert min(min(bounds), finite.sum()) <= len(kept) <= max(bounds), f"{row}: {len(kept)} stay, not {set(bounds)}"


FEW_VALUES = st.integers(-6, 6).map(lambda i: i / 2)  # many ties
ANY_VALUES = st.floats(-20, 20, width=32)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    vocab_size = draw(st.integers(1, 12))
    values = draw(st.sampled_from([FEW_VALUES, ANY_VALUES]))
    return [
        Row(
            draw(st.lists(values, min_size=vocab_size, max_size=vocab_size)),
            temperature=draw(st.sampled_from([0.1, 0.7, 1.0, 2.0])),
            top_k=draw(st.integers(0, vocab_size + 1)),
            top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches())
def test_what_stays_is_the_right_prefix_of_the_falling_order(rows: list[Row]) -> None:
    for row, kept in zip(rows, run_filters(rows), strict=True):
        check_kept(row, kept)


def test_top_k_keeps_exactly_k_of_a_tied_row_and_these_are_the_lowest_ids() -> None:
    (kept,) = run_filters([Row([1.0] * 10, top_k=4)])
    assert kept.tolist() == [0, 1, 2, 3]


def test_top_k_1_is_the_argmax_where_temperature_merges_the_two_best() -> None:
    temperature = np.float32(1.5)
    values = np.float32(1.6) + np.arange(8, dtype=np.float32) * np.spacing(np.float32(1.6))
    low = np.flatnonzero(np.diff(values / temperature) == 0)[0]
    assert values[low] < values[low + 1], "the example must merge two values that differ"
    (kept,) = run_filters([Row([values[low], values[low + 1], 0.0], temperature=1.5, top_k=1)])
    assert kept.tolist() == [1]


def test_top_p_keeps_one_token_however_small_p_is() -> None:
    (kept,) = run_filters([Row([0.0, 5.0, 1.0], top_p=1e-30)])
    assert kept.tolist() == [1]


def test_top_p_counts_what_top_k_left_not_the_whole_row() -> None:
    # Of the two that top-k leaves, the first holds 0.73: enough for 0.7 of them, not of the row.
    logits = [1.0, 0.0, *[-0.1] * 50]
    (kept,) = run_filters([Row(logits, top_k=2, top_p=0.7)])
    assert kept.tolist() == [0]


def test_removed_tokens_are_never_taken_back() -> None:
    (kept,) = run_filters([Row([-np.inf, 1.0, -np.inf, 0.5], top_k=3, top_p=0.9999)])
    assert kept.tolist() == [1, 3]


def test_top_p_settles_in_a_large_vocabulary_where_float32_sums_would_drift() -> None:
    rng = np.random.default_rng(0)
    row = Row(rng.normal(0, 0.1, 60_000).astype(np.float32).tolist(), top_p=0.99)
    (kept,) = run_filters([row])
    check_kept(row, kept)


@pytest.mark.parametrize("asking", [[1], [1, 2], [0, 2, 4], [4]])
def test_rows_that_do_not_ask_stay_as_they_are(asking: list[int]) -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    n = len(asking)
    apply_filters(logits, np.array(asking), torch.ones(n), torch.full((n,), 2), torch.full((n,), 0.999), torch.zeros(n))
    others = [row for row in range(5) if row not in asking]
    assert torch.equal(logits[others], before[others])
    assert (logits[asking] > -torch.inf).sum(dim=1).tolist() == [2] * n
