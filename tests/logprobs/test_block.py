"""A step's block gives each sequence its rows, and what is handed out holds nothing of the block."""

from collections.abc import Sequence

import numpy as np
import pytest

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.logprobs.block import BlockReader, LogprobsBlock, WholeRows, count_rows, take_rows
from vllm.logprobs.rows import EMPTY_SLOT, read_arrays, read_chosen_value, read_entries


def make_rectangle(num_entries: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_rows = len(num_entries)
    ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    values = -ids.astype(np.float32) / 8
    values[0, 0] = -np.inf
    ranks = ids + 1
    ids[np.arange(width) >= np.array(num_entries)[:, None]] = EMPTY_SLOT
    return ids, values, ranks


def make_block(num_entries: Sequence[int], width: int) -> LogprobsBlock:
    return LogprobsBlock.of_rectangle(*make_rectangle(num_entries, width))


# few empty slots and many: with one entry of six, a row of 70 beside short ones, and rows too wide to unpack
SHAPES = [([3, 1, 2, 3], 3), ([6, 6, 6], 6), ([1], 1), ([1, 1, 6], 6), ([1, 70, 2, 1], 70), ([70, 69, 70], 70)]


@pytest.mark.parametrize(("counts", "width"), SHAPES, ids=str)
def test_each_row_reads_as_its_entries(counts: list[int], width: int) -> None:
    ids, values, ranks = make_rectangle(counts, width)
    block = LogprobsBlock.of_rectangle(ids, values, ranks)
    assert (block.sizes is None) is (2 * sum(counts) >= width * len(counts)), "mostly empty slots are left out"
    flat = FlatLogprobs.of_rows([*block.split()])
    assert len(flat) == len(counts) and flat.is_frozen
    for i, count in enumerate(counts):
        expected = (ids[i, :count].tolist(), values[i, :count].tolist(), ranks[i, :count].tolist())
        assert tuple(map(list, read_entries(block.split()[i]))) == expected
        assert tuple(column.tolist() for column in read_arrays(block.split()[i])) == expected
        assert tuple(column.tolist() for column in flat.row_values(i)) == expected
    columns = flat.to_numpy()
    assert columns.row_starts.tolist() == [0, *np.cumsum(counts).tolist()]
    assert columns.token_ids.tolist() == [token_id for row in ids.tolist() for token_id in row if token_id >= 0]
    assert flat.chosen_values().tolist() == values[:, 0].tolist() == block.get_chosen_values().tolist()
    assert list(map(read_chosen_value, block.split())) == values[:, 0].tolist()


def test_a_rectangle_loses_exactly_its_empty_slots() -> None:
    token_ids = np.array([[3, 1, -1], [2, -1, -1], [5, 6, 4]], np.int32)
    values = np.array([[-1.0, -0.5, 9], [-2.0, 9, 9], [-0.25, -0.5, -0.75]], np.float32)
    ranks = np.array([[2, 1, 99], [7, 99, 99], [1, 2, 3]], np.int32)
    flat = FlatLogprobs.of_rows([*LogprobsBlock.of_rectangle(token_ids, values, ranks).split()])
    assert flat == [
        {3: Logprob(-1.0, 2), 1: Logprob(-0.5, 1)},
        {2: Logprob(-2.0, 7)},
        {5: Logprob(-0.25, 1), 6: Logprob(-0.5, 2), 4: Logprob(-0.75, 3)},
    ]


def test_a_rectangle_is_copied() -> None:
    ids, values, ranks = make_rectangle([2, 3], 3)
    block = LogprobsBlock.of_rectangle(ids, values, ranks)
    ids[:], values[:], ranks[:] = 0, 0, 0  # the runner's memory is used again
    assert list(read_entries(block.split()[1])[0]) == [3, 4, 5]


@pytest.mark.parametrize(("counts", "width"), SHAPES[:2] + SHAPES[3:5], ids=str)
@pytest.mark.parametrize("rows", [range(3), range(1, 2), [2], [2, 0], []], ids=str)
def test_rows_are_taken_in_any_order_with_their_chosen_values(
    counts: list[int], width: int, rows: range | list[int]
) -> None:
    block = make_block(counts, width)
    reader = BlockReader(block)
    everything, values = list(block.split()), block.get_chosen_values()
    assert list(reader.read(rows)) == [everything[row] for row in rows]
    assert reader.get_chosen_values(rows).tolist() == values[list(rows)].tolist()


def test_what_is_read_holds_nothing_of_the_block() -> None:
    block = make_block([3, 2, 3], 3)
    reader = BlockReader(block)
    values = reader.get_chosen_values(range(3))
    block.entries[:] = 0
    assert list(read_entries(reader.read(range(1, 2))[0])[0]) == [3, 4]
    assert values.tolist() == [-np.inf, -3 / 8, -6 / 8]


def test_blocks_of_any_width_join() -> None:
    blocks = [make_block(*shape) for shape in SHAPES]
    joined = LogprobsBlock.concatenate(blocks)
    separate = [read_entries(row) for block in blocks for row in block.split()]
    assert [tuple(map(tuple, read_entries(row))) for row in joined.split()] == [tuple(map(tuple, e)) for e in separate]
    assert LogprobsBlock.concatenate(blocks[:1]) is blocks[0]


def make_pieces() -> list[WholeRows]:
    pieces = []
    for first, count in ((0, 2), (2, 1), (3, 3)):
        values = -np.arange(count * 4, dtype=np.float32).reshape(count, 4) - first
        ranks = np.tile(np.arange(1, 5, dtype=np.int32), (count, 1))
        pieces.append(WholeRows(np.arange(first, first + count, dtype=np.int32) % 4, values, ranks))
    return pieces


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("end", range(7))
def test_some_of_the_whole_rows_are_copied_out_of_their_pieces(first: int, end: int) -> None:
    pieces = make_pieces()
    assert count_rows(pieces) == 6
    taken = take_rows(pieces, first, end)
    everything = [row for piece in pieces for row in piece.split()]
    rows = [row for piece in taken for row in piece.split()]
    assert FlatLogprobs.of_rows([*rows]) == FlatLogprobs.of_rows([*everything[first:end]])
    if (first, end) != (0, 6):
        for row in rows:
            assert not any(np.shares_memory(row.values, piece.values) for piece in pieces)
