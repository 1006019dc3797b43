"""Draws follow the distribution that the filters leave, and depend on seed and position alone."""

import numpy as np
import pytest
import scipy.stats
import torch

from tests.v1.sample.reference import filtered_probabilities
from vllm.v1.sample.ops.random import draw, to_seed_bits
from vllm.v1.sample.ops.topk_topp_sampler import apply_filters

NUM_DRAWS = 8000
LOGITS = np.array([2.0, 1.5, 1.5, 0.5, 0.0, -0.5, -1.0, -3.0, 1.0, 0.25], np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 2},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_frequencies_of_draws_are_those_of_the_filtered_distribution(settings: dict[str, float]) -> None:
    logits = torch.from_numpy(LOGITS.copy())[None]
    temperature = torch.tensor([settings.get("temperature", 1.0)])
    apply_filters(
        logits,
        np.array([0]),
        temperature,
        torch.tensor([settings.get("top_k", len(LOGITS))]),
        torch.tensor([settings.get("top_p", 1.0)]),
        torch.tensor([settings.get("min_p", 0.0)]),
    )
    rows, seeds = np.zeros(NUM_DRAWS, np.int32), np.arange(NUM_DRAWS, dtype=np.int64)
    drawn = draw(logits / temperature, rows, seeds, np.full(NUM_DRAWS, 5, np.int64)).numpy()
    expected = filtered_probabilities(LOGITS, **settings) * NUM_DRAWS  # type: ignore[arg-type]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    # Fixed seeds: the p-value is always the same; a wrong temperature or filter puts it below 1e-10.
    assert scipy.stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = torch.from_numpy(LOGITS.copy())[None]
    rows, positions = np.zeros(NUM_DRAWS, np.int32), np.arange(NUM_DRAWS, dtype=np.int64)
    drawn = draw(logits, rows, np.full(NUM_DRAWS, 123, np.int64), positions).numpy()
    expected = filtered_probabilities(LOGITS) * NUM_DRAWS
    assert scipy.stats.chisquare(np.bincount(drawn, minlength=len(LOGITS)), expected).pvalue > 1e-3
    pairs = np.histogram2d(drawn[:-1], drawn[1:], bins=np.arange(len(LOGITS) + 1) - 0.5)[0]
    assert scipy.stats.chi2_contingency(pairs[:7, :7] + 1).pvalue > 1e-3


def test_a_draw_does_not_depend_on_its_batch_mates() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = np.array([0, 0, 1, 2, 2, 2], np.int32)
    seeds = np.array([1, to_seed_bits(2**64 - 1), 5, 7, 8, 7], np.int64)
    positions = np.array([3, 3, 2**33, 9, 9, 9], np.int64)
    together = draw(logits, rows, seeds, positions).tolist()
    alone = [draw(logits[[r]], np.zeros(1, np.int32), seeds[[i]], positions[[i]]).item() for i, r in enumerate(rows)]
    assert together == alone
    assert together[3] == together[5]


@pytest.mark.parametrize(
    ("seed", "bits"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (2**64 + 3, 3)]
)
def test_seeds_wrap_at_64_bits(seed: int, bits: int) -> None:
    assert to_seed_bits(seed) == bits
