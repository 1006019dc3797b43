"""Packed rows read like rows in arrays, and what is handed out holds nothing of its step."""

import copy
import pickle

import numpy as np
import pytest

from vllm.logprobs import FlatLogprobs
from vllm.logprobs_packed import PackedBlock, PackedRows, PackedStep, read_packed_row, regroup


class Upper:
    """Texts that tell which row asked."""

    def decode_row(self, row_index: int, token_ids: list[int]) -> list[str]:
        return [f"{row_index}:{token_id}" for token_id in token_ids]


def make_rectangle(num_entries: list[int], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    num_rows = len(num_entries)
    ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    values = -ids.astype(np.float32) / 8
    values[0, 0] = -np.inf
    return ids, values, ids + 1, np.array(num_entries, np.int32)


@pytest.mark.parametrize("width", [1, 3, 6])
@pytest.mark.parametrize("is_filled", [True, False])
def test_a_rectangle_reads_as_its_ragged_rows(width: int, is_filled: bool) -> None:
    ids, values, ranks, counts = make_rectangle([width if is_filled else 1 + i % width for i in range(7)], width)
    flat = FlatLogprobs.from_rectangle(ids, values, ranks, counts)
    assert len(flat) == 7 and flat.is_frozen
    for i, count in enumerate(counts.tolist()):
        row = flat.row_values(i)
        assert row.token_ids.tolist() == ids[i, :count].tolist()
        assert row.values.tolist() == values[i, :count].tolist() and row.ranks.tolist() == ranks[i, :count].tolist()
    assert flat.chosen_values().tolist() == values[:, 0].tolist()


def test_a_rectangle_is_copied() -> None:
    ids, values, ranks, counts = make_rectangle([2, 3], 3)
    flat = FlatLogprobs.from_rectangle(ids, values, ranks, counts)
    ids[:], values[:], ranks[:] = 0, 0, 0  # the runner's memory is used again
    assert list(flat[1]) == [3, 4, 5] and flat[1][4].rank == 5


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 1], [0, 1, 2]], ids=str)
def test_rows_are_cut_for_many_sequences_at_once(rows: list[int]) -> None:
    """Even rows and ragged ones, all of them and some, in any order; each piece reads as its row."""
    ids, values, ranks, counts = make_rectangle([3, 1, 2, 3], 3)
    even = PackedBlock.of_rectangle(ids, values, ranks, counts)
    ragged = FlatLogprobs._of_packed(even)[:]._pack()
    assert even.width == 3 and ragged.width == 0
    for block in (even, ragged):
        pieces, chosen = PackedStep(block).cut(rows)
        assert chosen == values[rows, 0].tolist()
        for row, piece in zip(rows, pieces, strict=True):
            read = read_packed_row(piece)
            count = counts[row]
            assert read.token_ids == tuple(ids[row, :count].tolist())
            assert read.values == tuple(values[row, :count].tolist())
            assert read.ranks == tuple(ranks[row, :count].tolist())


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1]], ids=str)
@pytest.mark.parametrize("num_steps", [1, 7])
def test_steps_regrouped_are_each_sequences_rows(rows: list[int], num_steps: int) -> None:
    """Beside pieces of single rows, and with each sequence's own width: sequence 1 never has more than one entry."""
    counts = [[[3, 1, 1 + step % 2, 1 + step % 3][i] for i in range(4)] for step in range(num_steps)]
    steps = [make_rectangle(count, 3) for count in counts]
    for number, step in enumerate(steps):
        step[0][:] += 100 * number
    blocks = [PackedBlock.of_rectangle(*step) for step in steps]
    runs, sums = regroup(blocks, rows, [0.5] * len(rows))
    for row, run, total in zip(rows, runs, sums, strict=True):
        expected = 0.5
        one_by_one, mixed = PackedRows(Upper()), PackedRows(Upper())
        mixed.append(PackedStep(blocks[0]), row)
        one_by_one.append(PackedStep(blocks[0]), row)
        mixed.pieces.append(run)
        for block in blocks:
            one_by_one.append(PackedStep(block), row)
            expected += float(block.entries.view(np.float32)[block.first_entries[row], 1])
        mixed.append(PackedStep(blocks[-1]), row)
        one_by_one.append(PackedStep(blocks[-1]), row)
        assert total == expected
        gathered = [FlatLogprobs._of_packed(*take(gathered)) for gathered in (mixed, one_by_one)]
        assert gathered[0] == gathered[1] and gathered[0].decoded_tokens == gathered[1].decoded_tokens
        assert mixed.num_taken == one_by_one.num_taken == num_steps + 2
        assert len(run.entries) == 12 * num_steps * max(count[row] for count in counts)
        alone = PackedRows()
        alone.pieces.append(run)
        read = FlatLogprobs._of_packed(*take(alone)).to_arrays()
        assert read.token_ids.tolist() == gathered[1][1:-1].to_arrays().token_ids.tolist()


def test_values_of_regrouped_steps_are_added_one_after_the_other() -> None:
    draw = np.random.default_rng(0)
    values = -np.exp(draw.uniform(-30, 3, (300, 2, 1))).astype(np.float32)  # far enough apart that a sum is rounded
    one = np.ones((2, 1), np.int32)
    blocks = [PackedBlock.of_rectangle(one, step, one, one[:, 0]) for step in values]
    totals = [-0.25, -1e3]
    _, sums = regroup(blocks, [0, 1], totals)
    for step in values:
        totals = [total + float(value) for total, value in zip(totals, step[:, 0], strict=True)]
    assert sums == totals


def test_rows_of_any_order_can_be_packed() -> None:
    ids = np.array([2, 5, 9, 1, 2], np.int32)
    in_id_order = FlatLogprobs.from_arrays(
        np.array([0, 3, 5]), ids, -ids.astype(np.float32), np.array([1, 2, 3, 4, 5], np.int32),
        chosen_token_ids=np.array([5, 2]), in_id_order=True,
    )  # fmt: skip
    rows = PackedRows()
    step = PackedStep(in_id_order._pack())
    for row in (1, 0):
        rows.append(step, row)
    assert step.chosen_values == [-5.0, -2.0]
    assert FlatLogprobs._of_packed(*take(rows)) == in_id_order[::-1]


def take(rows: PackedRows) -> tuple[object, object, int]:
    packed, first_row = rows.take()
    return packed, rows.texts, first_row


def gather(num_rows: int, is_taken_each_time: bool) -> list[FlatLogprobs]:
    rows = PackedRows(Upper())
    parts = []
    for i in range(num_rows):
        step = PackedStep(PackedBlock.of_rectangle(*make_rectangle([2, 1 + i % 3], 3)))
        rows.append(step, 1)
        if is_taken_each_time:
            parts.append(FlatLogprobs._of_packed(*take(rows)))
    return parts or [FlatLogprobs._of_packed(*take(rows))]


def test_deltas_joined_are_the_whole() -> None:
    (whole,) = gather(5, False)
    deltas = gather(5, True)
    assert [len(delta) for delta in deltas] == [1] * 5
    joined = FlatLogprobs.concatenate(deltas)
    assert joined == whole and joined.decoded_tokens == whole.decoded_tokens
    assert whole[4][3].decoded_token == "4:3", "a row keeps its number for the texts"


@pytest.mark.parametrize("is_read_before", [False, True])
def test_packed_rows_survive_pickle_and_deepcopy(is_read_before: bool) -> None:
    for flat in (*gather(3, False), *gather(2, True)):
        if is_read_before:
            list(flat)
        for other in (pickle.loads(pickle.dumps(flat)), copy.deepcopy(flat)):
            assert other == flat and other.decoded_tokens == flat.decoded_tokens


def test_nothing_gathered_is_an_empty_sequence() -> None:
    flat = FlatLogprobs._of_packed(*take(PackedRows()))
    assert len(flat) == 0 and list(flat) == [] and len(flat.to_arrays().token_ids) == 0
