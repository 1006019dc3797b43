"""The scorer against a float64 oracle: ragged sizes, extreme values, ties, threads, instruction sets."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.oracle import REFERENCE, is_close, judge_row
from vllm.ops import api

VOCAB_SIZES = [1, 7, 16, 511, 4097, 49152, 151936]
INF = float("inf")


def make_rows(vocab_size: int) -> dict[str, torch.Tensor]:
    """Make one row of each kind that has broken a scorer somewhere."""
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(vocab_size, generator=generator)
    some = torch.rand(vocab_size, generator=generator) < 0.3
    some[0] = False
    return {
        "plain": noise * 4,
        "ties en masse": noise.round(),
        "all equal": torch.full((vocab_size,), -2.5),
        "zeros of both signs": torch.where(some, -0.0, 0.0),
        "huge": noise * 5e37,
        "far below zero": noise - 1e30,
        "denormal": noise * 1e-40,
        "some removed": noise.masked_fill(some, -INF),
        "one left": torch.full((vocab_size,), -INF).index_fill(0, torch.tensor(vocab_size // 2), 3.0),
        "rising": torch.linspace(-30, 30, vocab_size) if vocab_size > 1 else torch.zeros(1),
        "falling": torch.linspace(30, -30, vocab_size) if vocab_size > 1 else torch.zeros(1),
        "sharp": noise.index_fill(0, torch.tensor(vocab_size - 1), 60.0),
    }


def make_case(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits, one chosen token a row, and a different number of alternatives a row."""
    logits = torch.stack(list(make_rows(vocab_size).values()))
    num_rows = logits.shape[0]
    chosen = torch.randint(vocab_size, (num_rows,), generator=torch.Generator().manual_seed(1))
    chosen[:3] = logits[:3].argmax(dim=1)  # the most likely one must be left out of the alternatives
    num_top = torch.arange(num_rows, dtype=torch.int32) * 7 % 20
    return logits, chosen, num_top


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_rows_hold_the_chosen_token_then_the_most_likely_ones(
    ops: ModuleType, vocab_size: int, as_logits: bool
) -> None:
    logits, chosen, num_top = make_case(vocab_size)
    scored = ops.score_rows(logits, chosen, num_top, 20, as_logits)
    assert scored.is_finite.all()
    for r, row in enumerate(logits.numpy()):
        oracle = judge_row(row)
        top = [int(t) for t in oracle.order[: int(num_top[r])] if t != chosen[r]]
        expected = [int(chosen[r]), *top]
        n = int(scored.num_entries[r])
        assert scored.token_ids[r, :n].tolist() == expected
        assert scored.ranks[r, :n].tolist() == oracle.ranks[expected].tolist()
        values = scored.values[r, :n].numpy()
        assert np.array_equal(values, row[expected]) if as_logits else is_close(values, oracle.log_probs[expected])
        assert set(scored.token_ids[r, n:].tolist()) <= {-1}
        assert set(scored.values[r, n:].tolist()) <= {-INF}
        assert set(scored.ranks[r, n:].tolist()) <= {0}


def test_the_exponential_is_right_over_its_whole_range(ops: ModuleType) -> None:
    gaps = torch.linspace(0, 120, 20_001)
    values, _, _ = ops.score_full_rows(torch.stack([torch.zeros_like(gaps), -gaps], dim=1), False)
    below = -gaps.double().numpy()
    expected = np.stack([np.zeros_like(below), below], axis=1) - np.log1p(np.exp(below))[:, None]
    assert is_close(values.numpy(), expected)


@pytest.mark.parametrize("vocab_size", [1, 7, 2049, 49152])
def test_num_top_of_the_vocabulary_or_more_means_all(ops: ModuleType, vocab_size: int) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    num_top = torch.tensor([vocab_size, vocab_size + 5], dtype=torch.int32)
    scored = ops.score_rows(logits, torch.tensor([0, 0]), num_top, vocab_size, False)
    assert scored.num_entries.tolist() == [vocab_size, vocab_size]
    oracle = judge_row(logits[0].numpy())
    assert scored.token_ids[0, 1:vocab_size].tolist() == [t for t in oracle.order.tolist() if t != 0]
    assert is_close(scored.values[0, :vocab_size].numpy(), oracle.log_probs[scored.token_ids[0, :vocab_size].numpy()])


@pytest.mark.parametrize("num_top", [1, 100, 1000, 1025, 3000])
def test_every_way_to_find_the_top_keeps_ties_in_order_of_id(ops: ModuleType, num_top: int) -> None:
    for name, row in make_rows(4097).items():
        scored = ops.score_rows(row[None], torch.tensor([4096]), torch.tensor([num_top]), num_top, True)
        expected = [t for t in judge_row(row.numpy()).order[:num_top].tolist() if t != 4096]
        assert scored.token_ids[0, 1 : int(scored.num_entries[0])].tolist() == expected, name


@pytest.mark.parametrize("vocab_size", [1, 7, 511, 49152])
def test_given_ids_come_in_their_order_with_true_ranks_and_no_repeats(ops: ModuleType, vocab_size: int) -> None:
    logits, chosen, _ = make_case(vocab_size)
    given_ids = torch.randint(-1, vocab_size, (logits.shape[0], 12), generator=torch.Generator().manual_seed(2)).int()
    given_ids[0] = -1
    given_ids[1] = int(chosen[1])
    given_ids[2, 3:9] = given_ids[2, 2]
    scored = ops.score_given_ids(logits, chosen.int(), given_ids, False)
    assert scored.token_ids.shape == (logits.shape[0], 13)
    for r, row in enumerate(logits.numpy()):
        expected = list(dict.fromkeys([int(chosen[r]), *(t for t in given_ids[r].tolist() if t >= 0)]))
        n = int(scored.num_entries[r])
        oracle = judge_row(row)
        assert scored.token_ids[r, :n].tolist() == expected
        assert scored.ranks[r, :n].tolist() == oracle.ranks[expected].tolist()
        assert is_close(scored.values[r, :n].numpy(), oracle.log_probs[expected])
        assert (scored.token_ids[r, n:] == -1).all()


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_full_rows_give_each_token_its_value_and_rank(ops: ModuleType, vocab_size: int, as_logits: bool) -> None:
    logits = torch.stack(list(make_rows(vocab_size).values()))
    values, ranks, is_finite = ops.score_full_rows(logits, as_logits)
    assert is_finite.all()
    for r, row in enumerate(logits.numpy()):
        oracle = judge_row(row)
        assert np.array_equal(ranks[r].numpy(), oracle.ranks)
        assert is_close(values[r].numpy(), row if as_logits else oracle.log_probs)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_argmax_takes_the_lowest_id_among_equals(ops: ModuleType, vocab_size: int) -> None:
    logits = torch.stack(list(make_rows(vocab_size).values()))
    token_ids, is_finite = ops.argmax_rows(logits)
    assert token_ids.tolist() == [int(judge_row(row).order[0]) for row in logits.numpy()]
    assert token_ids.dtype == torch.int32 and is_finite.all()


def test_rows_without_a_distribution_are_flagged_and_their_neighbours_are_right(ops: ModuleType) -> None:
    vocab_size = 5000
    logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(3))
    logits[1, 0] = float("nan")
    logits[3, 4999] = INF
    logits[5] = -INF
    logits[7, 4998] = float("nan")  # in the last, partial vector
    chosen, num_top = torch.zeros(9, dtype=torch.int64), torch.full((9,), 4)
    expected = [True, False, True, False, True, False, True, False, True]
    scored = ops.score_rows(logits, chosen, num_top, 4, False)
    assert scored.is_finite.tolist() == expected
    assert ops.score_given_ids(logits, chosen, torch.zeros(9, 1), False).is_finite.tolist() == expected
    assert ops.argmax_rows(logits)[1].tolist() == expected
    values, _, full_is_finite = ops.score_full_rows(logits, False)
    assert full_is_finite.tolist() == expected
    for r in range(9):
        if expected[r]:
            assert is_close(values[r].numpy(), judge_row(logits[r].numpy()).log_probs)
        else:
            assert values[r].isnan().all() and scored.values[r, 0].isnan()


def test_argmax_leaves_nan_aside_and_answers_for_a_row_of_nothing_else(ops: ModuleType) -> None:
    logits = torch.full((2, 20), float("nan"))
    logits[0, 17] = -1.0
    assert ops.argmax_rows(logits)[0].tolist() == [17, 0]


def test_rows_may_lie_apart_in_memory(ops: ModuleType) -> None:
    wide = torch.randn(4, 1000, generator=torch.Generator().manual_seed(4))
    view, copy = wide[::2, 100:700], wide[::2, 100:700].clone()
    chosen, num_top = torch.tensor([5, 599]), torch.tensor([3, 8])
    for a, b in zip(
        ops.score_rows(view, chosen, num_top, 8, False), ops.score_rows(copy, chosen, num_top, 8, False), strict=True
    ):
        assert torch.equal(a, b)
    assert torch.equal(ops.score_full_rows(view, False)[1], ops.score_full_rows(copy, False)[1])
    assert torch.equal(ops.argmax_rows(view)[0], ops.argmax_rows(copy)[0])


def test_no_rows_give_no_entries(ops: ModuleType) -> None:
    none = torch.empty(0, dtype=torch.int64)
    scored = ops.score_rows(torch.empty(0, 9), none, none, 4, False)
    assert scored.token_ids.shape == (0, 5) and scored.num_entries.shape == (0,)
    assert ops.argmax_rows(torch.empty(0, 9))[0].shape == (0,)
    assert ops.score_full_rows(torch.empty(0, 9), False)[0].shape == (0, 9)


@pytest.mark.parametrize("bad", [-1, 8])
def test_ids_outside_the_vocabulary_are_refused(ops: ModuleType, bad: int) -> None:
    logits, fine = torch.zeros(2, 8), torch.tensor([0, 0])
    with pytest.raises(IndexError):
        ops.score_rows(logits, torch.tensor([0, bad]), fine, 2, False)
    with pytest.raises(IndexError):
        ops.score_given_ids(logits, torch.tensor([bad, 0]), fine[:, None], False)
    with pytest.raises(IndexError):
        ops.score_given_ids(logits, fine, torch.tensor([[0], [8 if bad > 0 else -2]]), False)


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_num_top_that_does_not_fit_is_refused(ops: ModuleType, bad: int) -> None:
    with pytest.raises(ValueError, match="num_top"):
        ops.score_rows(torch.zeros(2, 8), torch.tensor([0, 0]), torch.tensor([1, bad]), 2, False)


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(num_rows: int) -> None:
    logits = torch.randn(num_rows, 49152, generator=torch.Generator().manual_seed(5)).round(decimals=1)
    chosen = torch.arange(num_rows) * 9001
    num_top = torch.full((num_rows,), 40)

    def compute() -> list[torch.Tensor]:
        return [
            *api.score_rows(logits, chosen, num_top, 40, False),
            *api.score_given_ids(logits, chosen, chosen[:, None] + torch.arange(30), False),
            *api.score_full_rows(logits, False),
            *api.argmax_rows(logits),
        ]

    torch.set_num_threads(1)
    alone = compute()
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert all(map(torch.equal, alone, compute())), num_threads


@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(num_threads: int) -> None:
    """Few rows are cut into slices of the vocabulary, one a thread; many are not."""
    logits = torch.randn(9, 49152, generator=torch.Generator().manual_seed(6)) * 4
    chosen, num_top = torch.arange(9) * 4001, torch.full((9,), 7)
    torch.set_num_threads(1)
    together = api.score_rows(logits, chosen, num_top, 7, False)
    torch.set_num_threads(num_threads)
    for first, end in ((0, 1), (1, 3), (3, 6), (6, 9)):
        rows = slice(first, end)
        part = api.score_rows(logits[rows], chosen[rows], num_top[rows], 7, False)
        assert all(torch.equal(whole[rows], some) for whole, some in zip(together, part, strict=True)), rows


def test_instruction_sets_give_the_same_bits(on_each_variant: Callable[[Callable[[], Any]], list[Any]]) -> None:
    for vocab_size in (7, 511, 49152):
        logits, chosen, num_top = make_case(vocab_size)
        full = on_each_variant(lambda logits=logits: api.score_full_rows(logits, False))
        top = on_each_variant(
            lambda logits=logits, chosen=chosen, num_top=num_top: api.score_rows(logits, chosen, num_top, 20, False)
        )
        for other in range(1, len(full)):
            assert all(map(torch.equal, full[0], full[other]))
            assert all(map(torch.equal, top[0], top[other]))


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.one_of(st.sampled_from([0.0, -0.0, 1.0, -3e38, 1e-45, float("-inf")]), floats), min_size=1).filter(
        lambda row: max(row) > float("-inf")
    ),
    data=st.data(),
)
def test_any_finite_row_is_ordered_ranked_and_normalised(row: list[float], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    num_top = data.draw(st.integers(0, len(row) + 2))
    logits = torch.tensor([row], dtype=torch.float32)
    oracle = judge_row(logits[0].numpy())
    expected = [chosen, *(t for t in oracle.order[:num_top].tolist() if t != chosen)]
    for score in (api.score_rows, REFERENCE.score_rows):
        scored = score(logits, torch.tensor([chosen]), torch.tensor([num_top]), num_top, False)
        n = int(scored.num_entries[0])
        assert scored.token_ids[0, :n].tolist() == expected
        assert scored.ranks[0, :n].tolist() == oracle.ranks[expected].tolist()
        assert is_close(scored.values[0, :n].numpy(), oracle.log_probs[expected])
