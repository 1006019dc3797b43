"""Draws: the generator's bits, the noise they make, and what a draw may depend on."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from tests.kernels.oracle import REFERENCE, philox4x32_10
from vllm.ops import api

INF = float("inf")
SEEDS = torch.tensor([0, 1, -1, 1 << 40, -(1 << 63), 123456789123456789])
POSITIONS = torch.tensor([0, 5, 1 << 33, 7, 2**62, 4095])


def compute_noise(bits: np.ndarray) -> np.ndarray:
    """The Gumbel noise of 32-bit words, in float64 from the float32 uniform on."""
    v = np.minimum(((bits + 0.5) * 2.0**-32).astype(np.float32), np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-v))


def test_the_oracle_gives_the_published_philox_vectors() -> None:
    ones = 0xFFFFFFFF
    assert philox4x32_10((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32_10((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits_of_pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    expected = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert philox4x32_10(digits_of_pi, (0xA4093822, 0x299F31D0)) == expected


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 511])
def test_bits_are_those_of_philox(ops: ModuleType, vocab_size: int) -> None:
    bits = ops.philox_bits(SEEDS, POSITIONS, vocab_size)
    assert bits.shape == (6, vocab_size)
    for seed, position, row in zip(SEEDS.tolist(), POSITIONS.tolist(), bits.tolist(), strict=True):
        halves = [number >> shift & 0xFFFFFFFF for number in (seed, position) for shift in (0, 32)]
        groups = [philox4x32_10((c, *halves[2:], 0), tuple(halves[:2])) for c in range((vocab_size + 3) // 4)]
        assert row == [word for group in groups for word in group][:vocab_size]


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 511, 4097, 49152])
def test_the_token_drawn_has_the_largest_noisy_logit(ops: ModuleType, vocab_size: int) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    row_of_draw = torch.tensor([0, 2, 1, 1, 0, 2], dtype=torch.int32)
    drawn = ops.draw_rows(logits, row_of_draw, SEEDS, POSITIONS)
    bits = REFERENCE.philox_bits(SEEDS, POSITIONS, vocab_size).numpy()
    noisy = logits.numpy()[row_of_draw] + compute_noise(bits)
    best = noisy.max(axis=1)
    assert (best - noisy[np.arange(6), drawn.numpy()] < 1e-5).all()
    assert drawn.dtype == torch.int32


def test_flat_and_rising_rows_are_drawn_as_the_reference_draws_them() -> None:
    levels = [0.0, 2.0**24, 1e30, -1e-40]  # at 2^24 noise moves in steps of 2: many noisy logits are equal
    for row in (torch.linspace(0, 80, 4999), *(torch.full((4999,), level) for level in levels)):
        arguments = row[None], torch.zeros(64, dtype=torch.int32), torch.arange(64), torch.arange(64) * 3
        assert torch.equal(api.draw_rows(*arguments), REFERENCE.draw_rows(*arguments))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -INF, 0.5, -4.0]])
    num_draws = 40_000
    positions = torch.arange(num_draws)
    drawn = api.draw_rows(logits, torch.zeros(num_draws), torch.full((num_draws,), 2024), positions)
    seen = np.bincount(drawn.numpy(), minlength=7)
    expected = num_draws * torch.softmax(logits[0].double(), 0).numpy()
    assert seen[4] == 0
    kept = expected > 0
    assert scipy.stats.chisquare(seen[kept], expected[kept]).pvalue > 1e-3


def test_seeds_and_positions_that_follow_each_other_draw_independently() -> None:
    logits = torch.zeros(1, 4)
    grid = torch.arange(120)
    seeds, positions = grid.repeat_interleave(120), grid.repeat(120)
    drawn = api.draw_rows(logits, torch.zeros(len(seeds)), seeds, positions).numpy().reshape(120, 120)
    for earlier, later in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        table = np.bincount((earlier * 4 + later).ravel(), minlength=16)
        assert scipy.stats.chisquare(table).pvalue > 1e-3


def test_a_draw_depends_on_its_own_row_seed_and_position_only(ops: ModuleType) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    row_of_draw = torch.tensor([0, 1, 1, 2, 2, 0], dtype=torch.int32)
    together = ops.draw_rows(logits, row_of_draw, SEEDS, POSITIONS)
    for d in range(6):
        alone = ops.draw_rows(
            logits[row_of_draw[d] : row_of_draw[d] + 1],
            torch.zeros(1, dtype=torch.int32),
            SEEDS[d : d + 1],
            POSITIONS[d : d + 1],
        )
        assert alone[0] == together[d]


def test_removing_other_tokens_leaves_the_noise_of_the_rest(ops: ModuleType) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2))
    first_draw = torch.zeros(1, dtype=torch.int32), torch.tensor([11]), torch.tensor([12])
    winner = int(ops.draw_rows(logits, *first_draw)[0])
    removed = logits.clone()
    removed[0, torch.arange(3000) % 2 != winner % 2] = -INF
    assert int(ops.draw_rows(removed, *first_draw)[0]) == winner
    removed[0, winner] = -INF
    assert int(ops.draw_rows(removed, *first_draw)[0]) % 2 == winner % 2


def test_a_winner_whose_own_noise_is_all_that_lifts_it_is_found() -> None:
    """Groups of tokens are passed over by a bound on their noise: it must hold for the largest noise there is."""
    vocab_size = 4096
    seeds, positions = torch.arange(300), torch.zeros(300, dtype=torch.int64)
    noise = compute_noise(REFERENCE.philox_bits(seeds, positions, vocab_size).numpy())
    place = np.unravel_index(noise[:, 64:].argmax(), noise[:, 64:].shape)
    draw, token = int(place[0]), int(place[1]) + 64
    assert noise[draw, token] > 13, "a noise that is seldom so large"
    row = torch.full((1, vocab_size), -INF)
    row[0, 0] = noise[draw, token] - noise[draw, 0] - 1e-3
    row[0, token] = 0.0
    for sign, winner in ((1, token), (-1, 0)):
        row[0, token] = sign * 2e-3 - 1e-3
        drawn = api.draw_rows(row, torch.zeros(1), seeds[draw : draw + 1], positions[:1])
        assert int(drawn[0]) == winner


def test_removed_tokens_nan_and_infinity(ops: ModuleType) -> None:
    logits = torch.zeros(4, 200)
    logits[0] = -INF
    logits[1] = float("nan")
    logits[1, 150] = -50.0
    logits[2, 77] = INF
    logits[2, 177] = INF
    logits[3, :199] = -INF
    drawn = ops.draw_rows(logits, torch.arange(4), torch.arange(4), torch.arange(4))
    assert drawn.tolist() == [0, 150, 77, 199]


def test_rows_that_are_not_there_are_refused(ops: ModuleType) -> None:
    for bad in (-1, 2):
        with pytest.raises(IndexError, match="row"):
            ops.draw_rows(torch.zeros(2, 8), torch.tensor([0, bad]), torch.zeros(2).long(), torch.zeros(2).long())


def test_no_draws_give_no_tokens(ops: ModuleType) -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert ops.draw_rows(torch.zeros(1, 8), none, none, none).shape == (0,)


@pytest.mark.parametrize("num_draws", [1, 3, 16])
def test_draws_do_not_depend_on_the_number_of_threads(num_draws: int) -> None:
    logits = torch.randn(2, 49152, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    arguments = logits, torch.arange(num_draws) % 2, torch.arange(num_draws), torch.arange(num_draws) + 100
    torch.set_num_threads(1)
    alone = api.draw_rows(*arguments)
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert torch.equal(alone, api.draw_rows(*arguments)), num_threads


def test_instruction_sets_draw_the_same(on_each_variant: Callable[[Callable[[], Any]], list[Any]]) -> None:
    for vocab_size in (7, 511, 49152):
        logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        arguments = logits, torch.zeros(40), torch.arange(40) << 35, torch.arange(40)
        drawn = on_each_variant(lambda arguments=arguments: api.draw_rows(*arguments))
        assert all(torch.equal(drawn[0], other) for other in drawn[1:])
        assert torch.equal(drawn[0], REFERENCE.draw_rows(*arguments))
