"""The scorer: rows of every kind in one call, against float64."""

import numpy as np
import pytest
import torch

from tests.v1.sample.reference import falling_order, log_softmax, ranks_of
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable, choose_kind, score

VOCAB = 300


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Half of the rows have many ties; some entries are −inf."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (num_rows, vocab_size)).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    logits[:, 7 % vocab_size] = -np.inf
    return torch.from_numpy(logits)


def check_rectangle_row(
    rectangle: LogprobsTensors, i: int, logits: np.ndarray, chosen: int, ids: list[int], as_logits: bool
) -> None:
    """Row i must hold the chosen token, then `ids` without it, with true values and ranks."""
    expected = [chosen, *(token_id for token_id in ids if token_id != chosen)]
    values = logits if as_logits else log_softmax(logits)
    num_entries = int((rectangle.token_ids[i] >= 0).sum())
    assert rectangle.token_ids[i, :num_entries].tolist() == expected
    np.testing.assert_allclose(rectangle.values[i, :num_entries].numpy(), values[expected], rtol=1e-6, atol=1e-6)
    assert rectangle.ranks[i, :num_entries].tolist() == ranks_of(logits)[expected].tolist()


@pytest.mark.parametrize(
    ("num_top", "has_given", "kind"),
    [
        (None, False, RowKind.NONE),
        (0, False, RowKind.TOP),
        (128, False, RowKind.TOP),
        (129, False, RowKind.WIDE),
        (VOCAB - 1, False, RowKind.WIDE),
        (VOCAB, False, RowKind.FULL),
        (5, True, RowKind.GIVEN),
        (None, True, RowKind.GIVEN),
    ],
)
def test_what_a_row_asks_decides_its_kind(num_top: int | None, has_given: bool, kind: RowKind) -> None:
    assert choose_kind(num_top, has_given, VOCAB) is kind


def test_the_whole_of_a_tiny_vocabulary_is_rectangular() -> None:
    assert choose_kind(20, False, 20) is RowKind.TOP


def test_rows_of_all_kinds_side_by_side_do_not_mix() -> None:
    kinds = [RowKind.TOP, RowKind.GIVEN, RowKind.TOP, RowKind.WIDE, RowKind.FULL, RowKind.TOP, RowKind.GIVEN]
    num_top = [5, 0, 0, 150, VOCAB, 128, 0]
    as_logits = [False, False, True, False, True, False, True]
    given = np.full((7, 3), -1, np.int32)
    given[1, :2], given[6] = [250, 4], [9, 9, 1]
    logits = make_logits(7)
    chosen = [3, 4, 100, 7, 2, 299, 1]
    table = ScoreTable(np.array(kinds, np.int8), np.array(num_top, np.int32), np.array(as_logits), given)
    scores = score(logits, torch.tensor(chosen, dtype=torch.int32), table)

    assert scores.is_finite.all()
    assert scores.rectangle is not None and scores.rectangle.num_rows == 5
    host = logits.numpy()
    order = [falling_order(row).tolist() for row in host]
    check_rectangle_row(scores.rectangle, 0, host[0], 3, order[0][:5], False)
    check_rectangle_row(scores.rectangle, 1, host[1], 4, [250], False)
    check_rectangle_row(scores.rectangle, 2, host[2], 100, [], True)
    check_rectangle_row(scores.rectangle, 3, host[5], 299, order[5][:128], False)
    check_rectangle_row(scores.rectangle, 4, host[6], 1, [9], True)

    wide, full = scores.wide
    assert (wide.first, full.first) == (3, 4)
    assert wide.token_ids is not None
    check_rectangle_row(LogprobsTensors(wide.token_ids, wide.values, wide.ranks), 0, host[3], 7, order[3][:150], False)
    assert full.token_ids is None and full.chosen_token_ids.tolist() == [2]
    assert torch.equal(full.values[0], logits[4])
    assert full.ranks[0].tolist() == ranks_of(host[4]).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 5])
def test_k_beyond_a_tiny_vocabulary_means_all(vocab_size: int) -> None:
    logits = torch.arange(vocab_size, dtype=torch.float32)[None]
    table = ScoreTable(np.array([RowKind.TOP], np.int8), np.array([vocab_size], np.int32), np.array([False]))
    rectangle = score(logits, torch.tensor([0]), table).rectangle
    assert rectangle is not None
    assert rectangle.token_ids[0, :vocab_size].tolist() == [0, *range(vocab_size - 1, 0, -1)]
    assert rectangle.values[0, :vocab_size].exp().sum() == pytest.approx(1)


def test_rows_that_are_not_finite_are_flagged_and_others_are_as_if_alone() -> None:
    logits = make_logits(4)
    table = ScoreTable(np.full(4, RowKind.TOP, np.int8), np.full(4, 3, np.int32), np.zeros(4, bool))
    chosen = torch.tensor([1, 2, 3, 4])
    alone = score(logits, chosen, table).rectangle
    logits[1, 50], logits[2, 0] = torch.nan, torch.inf
    scores = score(logits, chosen, table)
    assert scores.is_finite.tolist() == [True, False, False, True]
    assert scores.rectangle is not None and alone is not None
    for mine, theirs in zip(scores.rectangle, alone, strict=True):
        assert torch.equal(mine[[0, 3]], theirs[[0, 3]])


def test_an_expanded_view_scores_as_its_written_out_rows() -> None:
    """The draws of a family share one row of logits, which nobody repeats."""
    row = make_logits(1)
    table = ScoreTable(np.full(3, RowKind.TOP, np.int8), np.full(3, 2, np.int32), np.zeros(3, bool))
    chosen = torch.tensor([1, 2, 3])
    mine, theirs = score(row.expand(3, -1), chosen, table), score(row.repeat(3, 1), chosen, table)
    assert mine.rectangle is not None and theirs.rectangle is not None
    for one, other in zip(mine.rectangle, theirs.rectangle, strict=True):
        assert torch.equal(one, other)


def test_concatenating_rectangles_keeps_rows_and_takes_the_largest_width() -> None:
    parts = [
        LogprobsTensors(
            torch.full((2, width), width, dtype=torch.int32),
            torch.full((2, width), float(width)),
            torch.full((2, width), width, dtype=torch.int32),
        )
        for width in (1, 3)
    ]
    joined = LogprobsTensors.concatenate(parts)
    assert joined.token_ids.shape == (4, 3)
    assert (joined.token_ids >= 0).sum(1).tolist() == [1, 1, 3, 3]
    assert joined.values[:2, 0].tolist() == [1, 1] and joined.values[2:].eq(3).all()
